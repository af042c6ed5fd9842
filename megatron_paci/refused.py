"""What PACI refuses of Megatron's features, one rule per feature.

Those of the schedule, of parallelism and of the model are here, those of the optimizer and of the
training loop in refused_training.py.

To let a feature through, delete its rule and add its line, with the tests that prove it, to
features.py; ``python docs/compatibility.py`` then writes the table anew.
"""

from __future__ import annotations

import os

from megatron_paci.refused_training import LOOP, OPTIMIZER
from megatron_paci.rules import (
    WINDOW_RULES,
    Rule,
    has_virtual_stages,
    is_set,
    more_than_one,
    refuse,
)
from megatron_paci.windows import shortest_window


def _balances_by_quantiles(args) -> bool:
    """Whether routers balance their load by quantiles over an iteration."""
    kinds = getattr(args, "moe_router_load_balancing_type", None) or ()
    return "quantile_balancing" in ([kinds] if isinstance(kinds, str) else kinds)


def _predicts_early(args) -> bool:
    """Whether a layout puts layers of multi-token prediction before the last stage."""
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if layout is None or not getattr(args, "mtp_num_layers", None):
        return False
    return "m" in layout[: layout.rfind("|") + 1]


def _has_auxiliary_losses(args) -> bool:
    """Whether losses other than the main one are scaled on their own stage."""
    if getattr(args, "mtp_num_layers", None):
        return True
    kinds = getattr(args, "moe_router_load_balancing_type", None) or "none"
    balances = any(kind != "none" for kind in ([kinds] if isinstance(kinds, str) else kinds))
    return is_set("num_experts")(args) and (balances or is_set("moe_z_loss_coeff")(args))


def _has_one_queue(args) -> bool:
    """Whether all that a GPU does goes through one hardware queue."""
    nccl = getattr(args, "distributed_backend", "nccl") == "nccl"
    return nccl and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def _fills_one_queue(args) -> bool:
    """Whether tied weights of more windows are under way than one hardware queue can order."""
    if not _has_one_queue(args):
        return False
    shares = not getattr(args, "untie_embeddings_and_output_weights", False)
    window = shortest_window(args)
    if not (window and (shares or getattr(args, "mtp_num_layers", None))):
        return False
    return args.pipeline_model_parallel_size + args.paci_defer_step > 4 * window


SCHEDULE = (
    Rule(
        "virtual pipeline stages",
        (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "pipeline_model_parallel_layout",
            "hybrid_layer_pattern",
            "hybrid_override_pattern",
        ),
        has_virtual_stages,
        "virtual stages: PACI runs one model chunk per rank, it has no bubble for them to fill",
        "drop {flags}, or give one stage per rank in the layout or pattern (drop the second chunk)",
    ),
    refuse(
        "CUDA graphs",
        "cuda_graph_impl enable_cuda_graph external_cuda_graph optimizer_cuda_graph",
        "CUDA graphs capture one fixed order of microbatches per iteration, PACI's runs on across "
        "iterations",
        "drop {flags}, or set --cuda-graph-impl none",
    ),
    refuse(
        "combined 1F1B, overlapped expert communication",
        "overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release",
        "pairs the forward of one microbatch with the backward of another inside Megatron's own "
        "schedules",
    ),
    refuse(
        "deferred weight gradients",
        "delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad "
        "defer_embedding_wgrad_compute",
        "weight gradients that come after their backward may miss the window they belong to",
    ),
    refuse(
        "activation offloading",
        "fine_grained_activation_offloading cpu_offloading_num_layers moe_paged_stash",
        "activations are fetched back in the order of Megatron's own schedules",
        "drop {flags}; e.g. --recompute-granularity full saves memory too",
    ),
    refuse(
        "runs that repeat an iteration",
        "moe_expert_rank_capacity_factor error_injection_rate",
        "re-runs an iteration in place, which is impossible while later microbatches are in flight",
    ),
    Rule(
        "inference-optimized layers",
        ("transformer_impl",),
        lambda args: getattr(args, "transformer_impl", None) == "inference_optimized",
        "layers for inference alone",
        "take --transformer-impl transformer_engine or local",
    ),
    refuse(
        "settings from a YAML file",
        "yaml_cfg",
        "a YAML file replaces the whole command line, --pipeline-schedule paci included, and its "
        "settings are not checked",
        "give the settings as flags",
    ),
)

PARALLELISM = (
    Rule(
        "tied embeddings, short windows and CUDA_DEVICE_MAX_CONNECTIONS=1",
        ("paci_accum", "paci_accum_schedule", "paci_defer_step"),
        _fills_one_queue,
        "with CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment and an embedding that the first and "
        "the last stage share, more than four windows in a pipeline can wait for each other for "
        "ever (docs/reliability.md)",
        "take --paci-accum of at least a quarter of the stages (one stage more counts with "
        "--paci-defer-step), unset "
        "CUDA_DEVICE_MAX_CONNECTIONS, or add --untie-embeddings-and-output-weights",
    ),
    Rule(
        "more microbatches in flight and CUDA_DEVICE_MAX_CONNECTIONS=1",
        ("paci_extra_in_flight",),
        lambda args: args.paci_extra_in_flight != 0 and _has_one_queue(args),
        "with CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment a second message that waits on a "
        "link holds back all that a GPU does, and stages can wait for each other for ever "
        "(docs/reliability.md)",
        "drop {flags}, or unset CUDA_DEVICE_MAX_CONNECTIONS where Megatron lets you",
    ),
    refuse(
        "Megatron FSDP, torch FSDP2",
        "use_megatron_fsdp use_torch_fsdp2",
        "fully sharded data parallelism gathers and frees the weights around each pass, which "
        "assumes that no optimizer step falls between a forward and its backward",
        "drop {flags}, take --use-distributed-optimizer",
    ),
    refuse(
        "hierarchical context parallelism",
        "hierarchical_context_parallel_sizes",
        "a choice of Transformer Engine's attention that has not been proved here",
    ),
    refuse(
        "hybrid context parallelism",
        "hybrid_context_parallel max_seqlen_per_dp_cp_rank",
        "a schedule of its own, with another number of microbatches in every iteration",
    ),
    refuse(
        "weights sharded over more ranks than tensor parallelism (GTP)",
        "tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards",
        "weights are gathered around each pass, and the ranks that share them count as replicas in "
        "groups PACI does not know",
    ),
    Rule(
        "several distributed optimizer instances",
        ("num_distributed_optimizer_instances",),
        more_than_one("num_distributed_optimizer_instances"),
        "gradients are reduced in two stages; not supported yet",
        "leave it at 1",
    ),
    refuse(
        "parameter gather within the optimizer step",
        "overlap_param_gather_with_optimizer_step",
        "belongs to virtual stages",
        "take --overlap-param-gather",
    ),
    Rule(
        "another pipeline backend",
        ("pipeline_model_parallel_comm_backend",),
        lambda args: getattr(args, "pipeline_model_parallel_comm_backend", None)
        not in (None, "nccl"),
        "PACI makes its own links between stages, with the default backend",
        "drop it, or take --pipeline-model-parallel-comm-backend nccl",
    ),
    refuse(
        "ring exchange",
        "use_ring_exchange_p2p",
        "sends and receives in one call, which PACI's one-way links cannot",
    ),
    refuse(
        "simulated process groups",
        "fake_process_group",
        "nothing is communicated, so a stage would wait for ever",
    ),
)

MODEL = (
    refuse(
        "fp8, fp4",
        "fp8 fp4 fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag "
        "te_precision_config_file use_kitchen_attention",
        "cached low-precision copies of weights and scaling factors follow iterations, not "
        "windows, and have not been proved here",
        "drop {flags}, take --bf16",
    ),
    Rule(
        "multi-token prediction before the last stage",
        ("pipeline_model_parallel_layout", "mtp_standalone"),
        _predicts_early,
        "its layers share the word embedding, and PACI keeps a copy of it on the last stage alone",
        "put every m of --pipeline-model-parallel-layout into the last stage, e.g. Et|tmL",
    ),
    refuse(
        "multi-token prediction clipped by itself",
        "mtp_detach_heads",
        "its gradients are clipped with a norm of their own, which PACI does not compute",
    ),
    Rule(
        "fp16 with auxiliary losses",
        ("fp16",),
        lambda args: getattr(args, "fp16", False)
        and getattr(args, "loss_scale", None) is None
        and _has_auxiliary_losses(args),
        "the auxiliary losses of mixture of experts and multi-token prediction are scaled by the "
        "stage's own dynamic loss scale, which may differ from that of the last stage",
        "give a constant --loss-scale, e.g. 4096, or take --bf16",
    ),
    Rule(
        "expert load balanced by quantiles",
        ("moe_router_load_balancing_type",),
        _balances_by_quantiles,
        "counts over the microbatches of an iteration, which forwards of the next one would join",
        "take --moe-router-load-balancing-type aux_loss, seq_aux_loss or global_aux_loss",
    ),
    refuse(
        "routing replay",
        "moe_enable_routing_replay",
        "keeps one routing per layer between passes, and several microbatches are in flight",
    ),
    refuse(
        "packed sequences",
        "sft dataloader_inter_document_masking",
        "packed sequences have lengths of their own; not supported yet",
    ),
    refuse(
        "learned sparse attention with a loss",
        "dsa_indexer_loss_coeff",
        "its indexer loss is scaled and logged by Megatron's own training step",
    ),
    refuse("vision pretraining", "vision_pretraining", "has hooks in Megatron's own training step"),
)

PACI_RULES = (*WINDOW_RULES, *SCHEDULE, *PARALLELISM, *MODEL, *OPTIMIZER, *LOOP)
