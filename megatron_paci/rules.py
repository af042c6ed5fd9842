"""The table of what is refused, one rule per combination.

The rules read Megatron's arguments as they were parsed, before Megatron validates and rewrites
them, so that a refused run ends before any process group, data set or model is made.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from megatron_paci.arguments import SCHEDULES


@dataclass(frozen=True)
class Rule:
    """One combination that is refused."""

    feature: str
    """The flags or the feature, as a user knows it."""

    violated: Callable[[argparse.Namespace], bool]
    """Whether parsed arguments break the rule."""

    reason: str
    """Why it cannot work, a template over the parsed arguments."""

    remedy: str
    """What to do instead, likewise."""


def _is_set(*names: str, unless: tuple = (None, False, 0, "none", [])) -> Callable[..., bool]:
    """Return a predicate: one of the arguments ``names`` has a value not among ``unless``."""
    return lambda args: any(getattr(args, name, None) not in unless for name in names)


def _more_than_one(name: str) -> Callable[..., bool]:
    return lambda args: (getattr(args, name, None) or 1) > 1


def has_virtual_stages(args: argparse.Namespace) -> bool:
    """Whether the flags ask for more than one model chunk per pipeline rank."""
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if layout is not None:
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout,
        )

        stages = PipelineParallelLayerLayout.get_num_stages_from_str(layout)
        return stages > args.pipeline_model_parallel_size
    return any(
        getattr(args, name, None) is not None
        for name in (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
        )
    )


def data_parallel_size(args: argparse.Namespace) -> int:
    """Return the number of data-parallel replicas that the flags imply."""
    model = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    return max(1, args.world_size // model)


def microbatch_counts(args: argparse.Namespace) -> tuple[int, ...]:
    """Return every number of microbatches per iteration that the flags lead to.

    More than one only with ``--step-batch-size-schedule``. Empty if the flags are incomplete,
    which Megatron itself reports.
    """
    samples = (args.micro_batch_size or 0) * data_parallel_size(args)
    schedule = getattr(args, "step_batch_size_schedule", None)
    if not samples:
        return ()
    if schedule is not None:
        try:
            sizes = [int(entry.split(":")[1]) for entry in schedule.split()]
        except (IndexError, ValueError):
            return ()
    else:
        sizes = [args.global_batch_size or samples]
    return tuple(size // samples for size in sizes)


def _bad_accumulation(args: argparse.Namespace) -> bool:
    accum = args.paci_accum
    return accum is not None and not (isinstance(accum, int) and accum >= 1)


def _indivisible(args: argparse.Namespace) -> bool:
    if args.paci_accum is None or _bad_accumulation(args):
        return False
    return any(count % args.paci_accum for count in microbatch_counts(args))


def divisors(args: argparse.Namespace) -> str:
    """Return the accumulations that fit every number of microbatches, as text."""
    counts = microbatch_counts(args)
    fitting = [a for a in range(1, min(counts) + 1) if not any(count % a for count in counts)]
    return " or ".join(map(str, fitting[-4:]))


SELECTION_RULES = (
    Rule(
        "--pipeline-schedule",
        lambda args: args.pipeline_schedule not in SCHEDULES,
        "--pipeline-schedule {args.pipeline_schedule}: there is no such schedule",
        "take one of " + ", ".join(SCHEDULES),
    ),
    Rule(
        "--pipeline-schedule 1f1b with virtual stages",
        lambda args: args.pipeline_schedule == "1f1b" and has_virtual_stages(args),
        "--pipeline-schedule 1f1b: with several model chunks per rank Megatron runs its "
        "interleaved schedule",
        "drop the virtual-stage flags, or take --pipeline-schedule interleaved",
    ),
    Rule(
        "--pipeline-schedule interleaved without virtual stages",
        lambda args: args.pipeline_schedule == "interleaved" and not has_virtual_stages(args),
        "--pipeline-schedule interleaved: needs several model chunks per rank",
        "add e.g. --num-virtual-stages-per-pipeline-rank 2",
    ),
    Rule(
        "--pipeline-schedule interleaved without pipeline",
        lambda args: args.pipeline_schedule == "interleaved"
        and args.pipeline_model_parallel_size == 1,
        "--pipeline-schedule interleaved: there is only one pipeline stage",
        "add e.g. --pipeline-model-parallel-size 2",
    ),
    Rule(
        "--paci-accum without paci",
        lambda args: args.paci_accum is not None and args.pipeline_schedule in SCHEDULES[:-1],
        "--paci-accum {args.paci_accum}: has no meaning under --pipeline-schedule "
        "{args.pipeline_schedule}",
        "add --pipeline-schedule paci, or drop --paci-accum",
    ),
)

PACI_RULES = (
    Rule(
        "--paci-accum",
        _bad_accumulation,
        "--paci-accum {args.paci_accum}: not a whole number of at least 1",
        "give the backward passes per optimizer step, e.g. --paci-accum 4",
    ),
    Rule(
        "--paci-accum that does not divide the microbatches",
        _indivisible,
        "--paci-accum {args.paci_accum}: does not divide the {counts} microbatches of an iteration "
        "(global batch / (micro batch * data parallel)), so drains would fall inside a window",
        "take --paci-accum {divisors}, or change --global-batch-size",
    ),
    Rule(
        "virtual pipeline stages",
        has_virtual_stages,
        "virtual pipeline stages: PACI runs one model chunk per rank, it has no bubble for them "
        "to fill",
        "drop --num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank or "
        "the second chunk of --pipeline-model-parallel-layout",
    ),
    Rule(
        "CUDA graphs",
        _is_set("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph",
                "optimizer_cuda_graph"),
        "CUDA graphs: they capture one fixed order of microbatches per iteration, PACI's runs on "
        "across iterations",
        "drop --cuda-graph-impl, --enable-cuda-graph, --external-cuda-graph and "
        "--optimizer-cuda-graph",
    ),
    Rule(
        "Megatron FSDP, torch FSDP2",
        _is_set("use_megatron_fsdp", "use_torch_fsdp2"),
        "fully sharded data parallelism: the sharded weights are gathered and freed around each "
        "pass, which assumes that no optimizer step falls between a forward and its backward",
        "drop --use-megatron-fsdp / --use-torch-fsdp2",
    ),
    Rule(
        "fp8, fp4",
        _is_set("fp8", "fp4"),
        "fp8 and fp4: their cached weight copies and scaling factors have not been proved here",
        "take --bf16",
    ),
    Rule(
        "several distributed optimizer instances",
        _more_than_one("num_distributed_optimizer_instances"),
        "--num-distributed-optimizer-instances: not supported yet",
        "leave it at 1",
    ),
    Rule(
        "packed sequences",
        _is_set("sft", "dataloader_inter_document_masking", "hybrid_context_parallel"),
        "packed or variable-length sequences: not supported yet",
        "drop --sft, --dataloader-inter-document-masking and --hybrid-context-parallel",
    ),
    Rule(
        "layer-wise distributed optimizer",
        lambda args: getattr(args, "optimizer", "adam") == "dist_muon"
        or (
            getattr(args, "optimizer", "adam") not in ("adam", "sgd")
            and getattr(args, "use_distributed_optimizer", False)
        ),
        "--optimizer {args.optimizer} distributed over replicas: Megatron's layer-wise distributed "
        "optimizer reduces its statistics over all ranks, stages included",
        "drop --use-distributed-optimizer and take muon instead of dist_muon, or take --optimizer "
        "adam",
    ),
    Rule(
        "optimizer offload",
        _is_set("optimizer_cpu_offload"),
        "--optimizer-cpu-offload: copies gradients and weights on streams of a GPU; not proved "
        "here",
        "drop --optimizer-cpu-offload",
    ),
    Rule(
        "reinforcement learning, distillation",
        _is_set("perform_rl_step", "modelopt_enabled", "logits_load_dir"),
        "reinforcement-learning and distillation loops drive the schedule themselves",
        "drop the flags of those loops",
    ),
    Rule(
        "norm of the parameters",
        _is_set("log_params_norm"),
        "--log-params-norm: reduces over all stages at every iteration",
        "drop it; the norms can be computed from a checkpoint",
    ),
    Rule(
        "monitors that gather over all ranks",
        _is_set("log_energy", "log_straggler", "adlr_autoresume", "gpu_sniff_test_interval",
                "enable_ft_package"),
        "--log-energy, --log-straggler, --adlr-autoresume, --gpu-sniff-test-interval and "
        "--enable-ft-package gather or check over all ranks while training runs",
        "drop them",
    ),
    Rule(
        "error injection",
        _is_set("error_injection_rate"),
        "--error-injection-rate: re-runs a step in place, which is impossible while later "
        "microbatches are in flight",
        "drop --error-injection-rate",
    ),
    Rule(
        "per-iteration tensor dumps",
        _is_set("save_wgrads_interval", "save_dgrads_interval", "save_activations_interval",
                "save_params_interval", "save_tokens_per_expert_interval"),
        "dumps of an iteration's gradients, activations or parameters: an iteration is no unit of "
        "work under PACI, its last backward passes belong to the next one",
        "drop --save-*-interval other than --save-interval",
    ),
    Rule(
        "features of Megatron's own schedules",
        _is_set("overlap_moe_expert_parallel_comm", "qk_clip", "log_max_attention_logit",
                "defer_embedding_wgrad_compute", "fine_grained_activation_offloading",
                "dsa_indexer_loss_coeff", "vision_pretraining"),
        "--overlap-moe-expert-parallel-comm, --qk-clip, --log-max-attention-logit, "
        "--defer-embedding-wgrad-compute, --fine-grained-activation-offloading, "
        "--dsa-indexer-loss-coeff and --vision-pretraining are tied to Megatron's own schedules "
        "and training step",
        "drop them",
    ),
    Rule(
        "time-out after the first iteration",
        _is_set("distributed_timeout_seconds_after_init"),
        "--distributed-timeout-seconds-after-init: synchronizes all ranks within the stream, after "
        "an iteration that stages may count differently",
        "set --distributed-timeout-minutes",
    ),
    Rule(
        "spiky-loss check",
        _is_set("check_for_spiky_loss"),
        "--check-for-spiky-loss: belongs to the rerun state machine, which PACI turns off",
        "drop it",
    ),
)
