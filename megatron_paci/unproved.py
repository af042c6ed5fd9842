"""Megatron's features that PACI lets through with one warning, because no CPU can run them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megatron_paci.features import Feature
from megatron_paci.rules import is_set


def unproved(
    name: str, arguments: str, why: str, in_use: Callable[[argparse.Namespace], bool] | None = None
) -> Feature:
    """Return a feature that needs a GPU; in use if one of its arguments is set, by default."""
    names = tuple(arguments.split())
    return Feature(name, names, why, in_use=in_use or is_set(*names))


UNPROVED = (
    unproved(
        "NCCL",
        "distributed_backend nccl_communicator_config_path use_sharp sharp_enabled_group "
        "high_priority_stream_groups nccl_ub disable_symmetric_registration",
        "tried with gloo alone; options of Megatron's groups do not hold for PACI's links",
        lambda args: getattr(args, "distributed_backend", None) == "nccl",
    ),
    unproved(
        "Transformer Engine",
        "transformer_impl te_rng_tracker use_transformer_engine_op_fuser",
        "its layers keep tensors of their own for the backward",
        lambda args: getattr(args, "transformer_impl", None) == "transformer_engine",
    ),
    unproved(
        "kinds of context-parallel communication",
        "cp_comm_type",
        "a choice of Transformer Engine's attention",
        lambda args: getattr(args, "context_parallel_size", 1) > 1
        and getattr(args, "transformer_impl", None) == "transformer_engine",
    ),
    unproved(
        "asynchronous checkpoints by nvidia-resiliency-ext",
        "async_strategy",
        "its process takes a CUDA device; Megatron's own is proved (--async-strategy mcore)",
        lambda args: bool(getattr(args, "async_save", False))
        and getattr(args, "async_strategy", None) != "mcore",
    ),
    unproved(
        "recomputation of modules other than core_attn",
        "recompute_modules",
        "Megatron itself cannot run it with --transformer-impl local",
        lambda args: bool({*(args.recompute_modules or ())} - {"core_attn"}),
    ),
    unproved(
        "gradient accumulation fusion",
        "gradient_accumulation_fusion",
        "a kernel adds the weight gradient to the window's buffer; left as it is",
    ),
    unproved(
        "overlapped or symmetric tensor-parallel communication",
        "tp_comm_overlap tp_comm_overlap_cfg tp_comm_bulk_wgrad tp_comm_bulk_dgrad "
        "tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag "
        "tp_comm_split_rs tp_comm_bootstrap_backend symmetric_ar_type",
        "its buffers are used by all passes in turn",
        is_set("tp_comm_overlap", "symmetric_ar_type"),
    ),
    unproved(
        "Mamba, gated delta net and sparse attention layers",
        "is_hybrid_model hybrid_layer_pattern hybrid_override_pattern mtp_hybrid_override_pattern "
        "experimental_attention_variant",
        "layers with GPU kernels alone",
    ),
    unproved(
        "GPU dispatchers and overlaps of experts",
        "moe_token_dispatcher_type moe_enable_deepep moe_grouped_gemm moe_shared_expert_overlap",
        "streams and buffers of their own",
        lambda args: getattr(args, "moe_token_dispatcher_type", None) == "flex"
        or is_set("moe_enable_deepep", "moe_grouped_gemm", "moe_shared_expert_overlap")(args),
    ),
    unproved(
        "fused kernels",
        "masked_softmax_fusion bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion "
        "apply_rope_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl use_flash_attn "
        "attention_backend flash_attention_version no_persist_layer_norm fused_residual_rmsnorm "
        "use_fused_weighted_squared_relu use_te_activation_func mla_down_proj_fusion "
        "moe_permute_fusion moe_router_fusion use_mamba_mem_eff_path dsa_kernel_backend "
        "disable_jit_fuser",
        "kernels of one operation, which know nothing of schedules",
        is_set("masked_softmax_fusion", "bias_gelu_fusion", "bias_swiglu_fusion",
               "bias_dropout_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion",
               "use_flash_attn", "fused_residual_rmsnorm", "moe_permute_fusion",
               "moe_router_fusion"),
    ),
)
