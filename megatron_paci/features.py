"""What PACI runs of Megatron's features that touch schedules, optimizer steps or communication.

Each is proved by the tests it names. What no CPU can run is in unproved.py, what is refused in
refused.py, what makes no difference in known_arguments.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """One feature that is let through."""

    name: str
    """The feature, as a user knows it."""

    arguments: tuple[str, ...]
    """Names in the parsed arguments that belong to it."""

    why: str
    """What PACI makes of it, or why it has not been tried."""

    proofs: tuple[str, ...] = ()
    """Tests, as pytest names them."""

    in_use: Callable[[argparse.Namespace], bool] | None = None
    """Whether parsed arguments use it, for what is let through unproved."""


ORACLES = "tests/gloo/test_oracles.py::"
PARALLEL = "tests/gloo/test_parallel.py::"
REPORTS = "tests/gloo/test_reports.py::"
EXPERTS = "tests/gloo/test_experts.py::"
FEATURES = "tests/gloo/test_features.py::"
VARIABLE = "tests/gloo/test_variable_lengths.py::"
FLAGS = "tests/gloo/test_flags.py::"
LOOP = "tests/gloo/test_loop.py::"
RESUME = "tests/gloo/test_resume.py::"
CHECKS = "tests/unit/test_compatibility.py::"

EQUALS_1F1B = "drained every window it equals 1F1B bitwise"


def works(name: str, arguments: str, why: str, *proofs: str) -> Feature:
    """Return a feature that tests prove; ``arguments`` are blank-separated."""
    return Feature(name, tuple(arguments.split()), why, proofs)


WORKS = (
    works(
        "pipeline stages, any number",
        "pipeline_model_parallel_size micro_batch_size global_batch_size",
        f"{EQUALS_1F1B}, undrained a replay in one process",
        f"{ORACLES}test_4_drained_every_window_equals_1f1b_on_two_stages",
        f"{ORACLES}test_4_drained_every_window_equals_1f1b_on_four_stages",
        f"{ORACLES}test_5_a_replay_in_one_process_equals_the_distributed_run",
        f"{ORACLES}test_6_one_stage_equals_gradient_accumulation",
    ),
    works(
        "uneven stages",
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
        "pipeline_model_parallel_layout account_for_embedding_in_pipeline_split "
        "account_for_loss_in_pipeline_split",
        "one chunk per rank, of any size, without layers too",
        f"{ORACLES}test_4_drained_every_window_equals_1f1b_on_four_stages",
        f"{FEATURES}test_4_drained_every_window_equals_1f1b",
        f"{FLAGS}test_4_drained_every_window_equals_1f1b",
    ),
    works(
        "bf16",
        "bf16",
        "updates the weights that are in use, eq. 1 of the paper",
        f"{ORACLES}test_4_drained_every_window_equals_1f1b_on_two_stages",
    ),
    works(
        "fp16 with loss scaling",
        "fp16 loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        "the last stage fixes the scale of a window",
        f"{REPORTS}test_an_fp16_overflow_lowers_the_scale_and_training_goes_on",
    ),
    works(
        "Adam, SGD, Muon, Lion, SOAP",
        "optimizer weight_decay adam_beta1 adam_beta2 adam_eps sgd_momentum muon_momentum "
        "muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type "
        "muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer lion_beta1 "
        "lion_beta2",
        f"{EQUALS_1F1B}; Muon and its like without the distributed optimizer",
        f"{ORACLES}test_4_drained_every_window_equals_1f1b_on_two_stages",
        f"{FEATURES}test_4_drained_every_window_equals_1f1b",
    ),
    works(
        "schedules of learning rate and weight decay",
        "lr min_lr lr_decay_style lr_wsd_decay_style lr_decay_iters lr_decay_samples "
        "lr_wsd_decay_iters lr_wsd_decay_samples lr_warmup_fraction lr_warmup_iters "
        "lr_warmup_samples lr_warmup_init start_weight_decay end_weight_decay "
        "weight_decay_incr_style decoupled_lr decoupled_min_lr apply_wd_to_qk_layernorm "
        "no_weight_decay_cond_type use_mup",
        "advance by the samples of each window",
        f"{FLAGS}test_4_drained_every_window_equals_1f1b",
    ),
    works(
        "clipping",
        "clip_grad",
        "with the norm that --paci-clip says",
        f"{REPORTS}test_clipping_and_its_rules_make_a_difference",
        f"{REPORTS}test_a_stream_equals_its_replay",
        f"{REPORTS}test_the_logged_norm_is_that_of_all_stages",
    ),
    works(
        "loss per token",
        "calculate_per_token_loss",
        "divided by the tokens of the window",
        f"{REPORTS}test_drained_every_window_equals_1f1b",
        f"{REPORTS}test_a_stream_equals_its_replay",
    ),
    works(
        "tied embeddings",
        "untie_embeddings_and_output_weights",
        "owned by the first stage; the last one has a copy",
        f"{REPORTS}test_tied_on_four_stages_equals_1f1b",
        f"{REPORTS}test_a_stream_equals_its_replay",
        f"{REPORTS}test_the_tied_copy_costs_no_memory",
        f"{PARALLEL}test_4_drained_every_window_equals_1f1b",
    ),
    works(
        "data parallelism",
        "use_tp_pp_dp_mapping overlap_grad_reduce align_grad_reduce ddp_num_buckets "
        "ddp_bucket_size ddp_pad_buckets_for_high_nccl_busbw ddp_average_in_collective "
        "grad_reduce_in_bf16 accumulate_allreduce_grads_in_fp32 "
        "ddp_param_name_patterns_for_fp32_local_accumulation "
        "ddp_reduce_scatter_with_fp32_accumulation check_weight_hash_across_dp_replicas_interval",
        "one reduction per window, within the stage",
        f"{PARALLEL}test_4_drained_every_window_equals_1f1b",
        f"{PARALLEL}test_replicas_stay_equal_while_the_stream_runs",
        f"{FLAGS}test_4_drained_every_window_equals_1f1b",
    ),
    works(
        "distributed optimizer",
        "use_distributed_optimizer overlap_param_gather align_param_gather",
        "a drain's backward waits for gathered weights",
        f"{PARALLEL}test_4_drained_every_window_equals_1f1b",
        f"{PARALLEL}test_overlapping_communication_changes_no_number",
    ),
    works(
        "context parallelism",
        "context_parallel_size",
        "within the stage",
        f"{PARALLEL}test_4_drained_every_window_equals_1f1b",
        f"{PARALLEL}test_5_a_stream_equals_its_replay",
    ),
    works(
        "mixture of experts, expert parallelism",
        "num_experts expert_model_parallel_size expert_tensor_parallel_size "
        "moe_router_enable_expert_bias moe_per_layer_logging",
        "auxiliary losses are scaled by the window and logged over all stages; expert biases "
        "follow the steps of their stage",
        f"{EXPERTS}test_4_drained_every_window_equals_1f1b",
        f"{EXPERTS}test_5_a_stream_equals_its_replay",
        f"{EXPERTS}test_the_logged_auxiliary_losses_of_a_stream_are_those_of_1f1b",
    ),
    works(
        "multi-token prediction",
        "mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer",
        "its layers on the last stage, with a copy of the first one's embedding",
        f"{EXPERTS}test_4_drained_every_window_equals_1f1b",
        f"{EXPERTS}test_5_a_stream_equals_its_replay",
    ),
    works(
        "variable sequence lengths (a field of the configuration, no flag)",
        "",
        "each forward message brings its shape",
        f"{VARIABLE}test_4_drained_every_window_equals_1f1b",
        f"{VARIABLE}test_5_a_stream_equals_its_replay",
    ),
    works(
        "tensor and sequence parallelism",
        "tensor_model_parallel_size sequence_parallel distribute_saved_activations",
        "within the stage",
        f"{PARALLEL}test_4_drained_every_window_equals_1f1b",
        f"{FLAGS}test_4_drained_every_window_equals_1f1b",
    ),
    works(
        "activation recomputation",
        "recompute_granularity recompute_method recompute_num_layers recompute_activations",
        "recomputes with the weights and random states that eq. 1 asks for",
        f"{ORACLES}test_4_drained_every_window_equals_1f1b_on_two_stages",
        f"{FLAGS}test_4_drained_every_window_equals_1f1b",
        f"{FEATURES}test_5_a_stream_equals_its_replay",
    ),
    works(
        "number of microbatches that changes",
        "step_batch_size_schedule decrease_batch_size_if_needed",
        "drains at the change; the window follows if no accumulation is given",
        f"{FLAGS}test_4_drained_every_window_equals_1f1b",
        f"{FLAGS}test_a_stream_does_the_same_work",
    ),
    works(
        "length of training in samples, iterations left out, ends by iteration",
        "train_iters train_samples iterations_to_skip phase_transition_iterations exit_interval",
        "drains before the end",
        f"{FLAGS}test_4_drained_every_window_equals_1f1b",
        f"{FLAGS}test_a_stream_does_the_same_work",
        f"{REPORTS}test_the_wish_of_one_stage_ends_all_at_the_same_iteration",
    ),
    works(
        "ends by signal or time",
        "exit_signal_handler exit_signal exit_duration_in_mins",
        "the wish and the decision travel along the pipeline",
        f"{REPORTS}test_the_wish_of_one_stage_ends_all_at_the_same_iteration",
        f"{LOOP}test_a_signal_to_one_replica_ends_both",
    ),
    works(
        "evaluation",
        "eval_interval eval_iters",
        "drains before",
        f"{ORACLES}test_4_drained_every_window_equals_1f1b_on_two_stages",
    ),
    works(
        "checkpoints",
        "save save_interval load ckpt_format",
        "drains before; exchanged with 1F1B in both directions",
        f"{RESUME}test_8_a_stopped_and_resumed_run_equals_one_that_was_not_stopped",
        "tests/gloo/test_interchange.py::test_a_checkpoint_is_the_one_that_1f1b_writes",
        f"{REPORTS}test_checkpoints_go_from_1f1b_to_paci_and_back",
    ),
    works(
        "asynchronous checkpoints",
        "async_save use_persistent_ckpt_worker",
        "drains before; asks whether one is written when it is drained, so it counts as complete "
        "at the next drain; tried with --async-strategy mcore",
        f"{RESUME}test_what_is_written_while_training_goes_on_is_the_state_of_that_iteration",
    ),
    works(
        "timers and statistics in the log",
        "timing_log_level timing_log_option barrier_with_L1_time log_timers_to_tensorboard "
        "log_num_zeros_in_grad log_throughput log_memory_to_tensorboard",
        "those of the logging rank, without a collective over stages",
        f"{LOOP}test_3_no_collective_over_stages_and_no_bubble",
    ),
    works(
        "rerun state machine",
        "rerun_mode check_for_nan_in_loss_and_grad",
        "turned off with a warning; --paci-nonfinite takes its place",
        f"{CHECKS}test_what_paci_replaces_is_turned_off_with_one_warning",
        f"{REPORTS}test_a_window_with_nan_is_left_out_where_it_can_be_known",
    ),
)
