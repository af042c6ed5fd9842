"""Tells Megatron's ``pretrain`` which GPT to build, in the way of the Megatron-Core at hand.

From 0.19 on ``megatron.training`` builds a GPT from a description of it. 0.18 has no such
description and calls a function of the launch script instead. Both give the same model.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import argument_utils, get_args
from megatron.training.arguments import core_transformer_config_from_args

# What build_gpt leaves to Megatron-LM's own launch script.
_NOT_BUILT = ("spec", "heterogeneous_layers_config_path", "experimental_attention_variant")


def pretrain_arguments(args: Namespace) -> dict[str, Any]:
    """Return the keyword arguments of Megatron's ``pretrain`` that concern the model.

    Raises:
        ValueError: Megatron-Core is 0.18 and a flag asks for another kind of layer than its GPT
            has by default.
    """
    container = argument_utils.pretrain_cfg_container_from_args
    if hasattr(argument_utils, "gpt_config_from_args"):
        return {"cfg_container": container(args, argument_utils.gpt_config_from_args(args))}
    if given := [name for name in _NOT_BUILT if getattr(args, name) is not None]:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(
            f"with Megatron-Core 0.18 this script cannot build what {flags} asks for; take "
            "Megatron-LM's own pretrain_gpt.py, or Megatron-Core 0.19"
        )
    return {"cfg_container": container(args), "model_provider": build_gpt}


def build_gpt(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> GPTModel:
    """Build one model chunk from the command line; has the signature of a model provider.

    Args:
        pre_process: Whether it holds the embedding.
        post_process: Whether it holds the output layer and the loss.
        vp_stage: Number of the chunk on this rank, None without virtual stages.
        config: None for that of the command line.
        pg_collection: Its ``pp`` tells which stage this is; None for Megatron's global groups.
    """
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    stage = {"vp_stage": vp_stage, "pp_rank": collection.pp.rank()}
    with_te = config.transformer_impl == "transformer_engine"
    layer = {"normalization": config.normalization, "qk_l2_norm": config.qk_l2_norm}
    mtp_block_spec = None
    if config.mtp_num_layers is not None:
        last_layer = get_gpt_decoder_layer_specs(config, with_te, **layer)[-1]
        mtp_block_spec = get_gpt_mtp_block_spec(config, last_layer, with_te, **stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, with_te, **layer, **stage),
        mtp_block_spec=mtp_block_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=collection,
    )
