"""What PACI refuses of the optimizer and of Megatron's training loop; goes on from refused.py."""

from __future__ import annotations

from megatron_paci.rules import Rule, refuse


def _is_layer_wise(args) -> bool:
    """Whether whole layers of an optimizer are spread over replicas."""
    optimizer = getattr(args, "optimizer", "adam")
    return optimizer == "dist_muon" or (
        optimizer not in ("adam", "sgd") and getattr(args, "use_distributed_optimizer", False)
    )


OPTIMIZER = (
    Rule(
        "layer-wise distributed optimizer",
        ("optimizer", "use_distributed_optimizer"),
        _is_layer_wise,
        "Megatron's layer-wise distributed optimizer reduces its statistics over all ranks, stages "
        "included",
        "take --optimizer muon or another one without --use-distributed-optimizer, or --optimizer "
        "adam with it",
    ),
    refuse(
        "optimizer offload",
        "optimizer_cpu_offload",
        "optimizer offload copies gradients and weights beside the step, and needs a GPU and the "
        "precision-aware optimizer to be proved",
    ),
    refuse(
        "precision-aware optimizer",
        "use_precision_aware_optimizer",
        "keeps the gradient to be clipped elsewhere, and needs Transformer Engine to be proved",
    ),
    refuse(
        "frozen model",
        "freeze_all_layers",
        "there is no optimizer, so no window ever ends in a step",
    ),
    refuse(
        "clipping of attention logits",
        "qk_clip log_max_attention_logit",
        "collects the logits of an iteration and reduces them over all stages after the step",
    ),
    refuse(
        "checks of the rerun state machine",
        "check_for_spiky_loss check_for_large_grads result_rejected_tracker_filename",
        "belongs to the rerun state machine, which PACI turns off",
        "drop {flags}; --iterations-to-skip names iterations to leave out",
    ),
)

LOOP = (
    refuse(
        "reinforcement learning, distillation",
        "perform_rl_step rl_profile modelopt_enabled logits_load_dir logits_save_dir",
        "reinforcement-learning and distillation loops drive or tap the schedule themselves",
    ),
    refuse(
        "waiting for the device",
        "train_sync_interval",
        "waits for the whole device while the stream runs, messages that come later included",
    ),
    refuse(
        "norm of the parameters",
        "log_params_norm",
        "reduces over all stages at every iteration",
        "drop it; the norms can be computed from a checkpoint",
    ),
    refuse(
        "monitors over all ranks",
        "log_energy log_straggler adlr_autoresume gpu_sniff_test_interval enable_ft_package",
        "monitors that gather or check over all ranks while training runs",
    ),
    refuse(
        "restart within the process",
        "inprocess_restart",
        "training begins again in a process whose microbatches in flight are lost",
        "drop it, restart from a checkpoint",
    ),
    refuse(
        "fault injection",
        "fault_injector_ranks fault_injector_num_ranks",
        "plans its faults with a broadcast over all ranks while training runs",
    ),
    refuse(
        "leaving training inside a step",
        "exit_signal_handler_for_training",
        "a signal leads to a barrier of all ranks wherever each of them is, with microbatches in "
        "flight",
        "take --exit-signal-handler",
    ),
    refuse(
        "tensor dumps and routing traces of an iteration",
        "save_wgrads_interval save_dgrads_interval save_activations_interval save_params_interval "
        "save_tokens_per_expert_interval moe_routing_trace_path",
        "dumps of one iteration: an iteration is no unit of work under PACI, its last backward "
        "passes belong to the next one",
        "drop {flags}; --save-interval works",
    ),
    refuse(
        "time-out after the first iteration",
        "distributed_timeout_seconds_after_init",
        "synchronizes all ranks within the stream, after an iteration that stages may count "
        "differently",
        "set --distributed-timeout-minutes",
    ),
    Rule(
        "checkpoint formats of FSDP",
        ("ckpt_format",),
        lambda args: getattr(args, "ckpt_format", None) in ("torch_dcp", "fsdp_dtensor"),
        "belongs to fully sharded data parallelism",
        "take --ckpt-format torch_dist",
    ),
)
