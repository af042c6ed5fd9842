"""A short launch script: pre-trains a GPT with megatron.training and Megatron's usual flags.

The megatron-core wheel has the training loop but no script to start it; this is one, for those who
have no Megatron-LM checkout at hand. It knows nothing of the schedule::

    torchrun --nproc-per-node 2 -m megatron_paci run --device cpu examples/pretrain_gpt.py \\
        --pipeline-model-parallel-size 2 <model and data flags> \\
        --pipeline-schedule paci --paci-accum 4
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import (
    get_blend_and_blend_per_split,
    is_first_or_last_pipeline_stage,
)

from megatron_paci.gpt import pretrain_arguments

FIELDS = ("tokens", "position_ids", "labels", "loss_mask", "attention_mask")


def reads_data(vp_stage: int | None = None) -> bool:
    """Whether this rank's model chunk needs tokens or labels."""
    return is_first_or_last_pipeline_stage(vp_stage)


def datasets(num_samples: list[int], vp_stage: int | None = None):
    """Build the training, validation and test sets that the data flags name."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(
        kind, num_samples, partial(reads_data, vp_stage), config
    ).build()


datasets.is_distributed = True  # every rank reads its own data, tensor-parallel ones the same


def forward_step(data_iterator, model):
    """Run one microbatch through this rank's model chunk.

    Returns:
        The output, (sequence, microbatch size, hidden), or per-token losses, (microbatch size,
        sequence), on the last stage; and the function that reduces the latter.
    """
    batch = dict.fromkeys(FIELDS)
    if reads_data(get_attr_wrapped_model(model, "vp_stage")):
        item = next(data_iterator)
        batch |= {field: item[field].cuda(non_blocking=True) for field in FIELDS if field in item}
        batch = get_batch_on_this_cp_rank(
            batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
        )
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_over_tokens, batch["loss_mask"])


def loss_over_tokens(loss_mask: torch.Tensor, losses: torch.Tensor):
    """Return the summed loss, the number of tokens it sums over, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """Return the ranks that hold word embeddings.

    The last one does if they are tied or if multi-token prediction embeds tokens there.
    """
    args = get_args()
    first, last = pipeline_ranks[0], pipeline_ranks[-1]
    only_first = args.untie_embeddings_and_output_weights and not args.mtp_num_layers
    return [first] if only_first else sorted({first, last})


def main() -> None:
    """Parse the flags and train."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    if mpu.model_parallel_is_initialized():
        raise RuntimeError("run this script in a process of its own")
    pretrain(
        **pretrain_arguments(args),
        train_valid_test_dataset_provider=datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        get_embedding_ranks=embedding_ranks,
    )


if __name__ == "__main__":
    main()
