"""What keeps Megatron's training loop from synchronizing the stages in every iteration.

Stock Megatron makes several collectives over all stages per iteration and more at each log line.
While the stream runs (between two drains) each of them is replaced by what this rank knows; as soon
as it is drained the originals work as ever.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from megatron.training import get_args, training
from megatron.training.global_vars import get_signal_handler

from megatron_paci.build import installed_stage
from megatron_paci.patching import Patch
from megatron_paci.report import EXIT_ON_DURATION, EXIT_ON_SIGNAL


def streaming() -> bool:
    """Whether microbatches may be in flight, here or on another stage."""
    stage = installed_stage()
    return stage is not None and stage.engine.streaming


def drain() -> None:
    """Drain the stream, if there is one."""
    if (stage := installed_stage()) is not None:
        stage.drain()


def exit_wishes() -> int:
    """Return the bits ``EXIT_ON_*`` that this rank wishes by itself."""
    args = get_args()
    wishes = 0
    if args.exit_signal_handler and get_signal_handler()._signal_received:
        wishes |= EXIT_ON_SIGNAL
    if args.exit_duration_in_mins:
        minutes = (time.time() - training._TRAIN_START_TIME) / 60.0
        wishes |= EXIT_ON_DURATION * (minutes > args.exit_duration_in_mins)
    return wishes


def _own_statistic(original, stat, *args, **kwargs):
    return stat if streaming() else original(stat, *args, **kwargs)


def _start_or_stop_alone(original, timer, barrier=False):
    if not streaming():
        return original(timer, barrier=barrier)
    # A timer waits for the whole device: for messages, too, whose receive is posted ahead and that
    # other stages send later. What this stage computes is on the current stream.
    whole_device = torch.cuda.synchronize
    torch.cuda.synchronize = torch.cuda.current_stream().synchronize
    try:
        return original(timer, barrier=False)
    finally:
        torch.cuda.synchronize = whole_device


def _own_times(original, timers, names, reset, barrier):
    """Fill in this rank's row alone; Megatron's reports leave out times that are zero."""
    if not streaming():
        return original(timers, names, reset, barrier)
    if not names:
        return None
    times = torch.zeros((torch.distributed.get_world_size(), len(names)))
    for column, name in enumerate(names):
        if name in timers._timers:
            elapsed = timers._timers[name].elapsed(reset=reset)
            times[torch.distributed.get_rank(), column] = elapsed
    return times


def _signals_received(original, handler):
    if not streaming():
        return original(handler)
    return [bool(installed_stage().exit_request.decision & EXIT_ON_SIGNAL)]


def _checkpoint_and_decide_exit(original, *args, **kwargs):
    """Let the decision that came along the pipeline take the place of the clock of each rank."""
    settings = get_args()
    saved: dict[str, Any] = {}
    if streaming() and settings.exit_duration_in_mins:
        names = ("exit_duration_in_mins", "exit_interval")
        saved = {name: getattr(settings, name) for name in names}
        settings.exit_duration_in_mins = None
        if installed_stage().exit_request.decision & EXIT_ON_DURATION:
            settings.exit_interval = 1
    try:
        ends = original(*args, **kwargs)
    finally:
        vars(settings).update(saved)
    if ends:
        drain()
    return ends


def _sum_router_metrics(original, tracker, metric_names, *args, **kwargs):
    stage = installed_stage()
    if stage is None or stage.suspended:
        original(tracker, metric_names, *args, **kwargs)
    elif stage.is_last_stage:  # it has the metrics of all stages already (router_metrics.py)
        original(tracker, metric_names, stage.stage_collection)


def _check_param_hashes(original, *args, **kwargs):
    drain()
    return original(*args, **kwargs)


def _maybe_finalize_async_save(original, blocking=False, terminate=False):
    # Asking all ranks whether their part is written can wait until the next drain.
    return None if streaming() and not blocking else original(blocking, terminate)


LOOP_PATCHES = (
    Patch(
        "megatron.training.utils.common_utils:reduce_max_stat_across_model_parallel_group",
        _own_statistic,
        ("stat",),
        "the logged learning rate: each stage knows its own",
    ),
    Patch(
        "megatron.core.timers:Timer.start",
        _start_or_stop_alone,
        ("self", "barrier"),
        "no barrier around the time between log lines, no wait for messages to come",
    ),
    Patch(
        "megatron.core.timers:Timer.stop",
        _start_or_stop_alone,
        ("self", "barrier"),
        "as for Timer.start",
    ),
    Patch(
        "megatron.core.timers:Timers._get_elapsed_time_all_ranks",
        _own_times,
        ("self", "names", "reset", "barrier"),
        "logged timers are those of the logging rank",
    ),
    Patch(
        "megatron.training.dist_signal_handler:DistributedSignalHandler.signals_received",
        _signals_received,
        ("self",),
        "a signal travels along the pipeline instead of being gathered in every iteration",
    ),
    Patch(
        "megatron.training.training:checkpoint_and_decide_exit",
        _checkpoint_and_decide_exit,
        ("model", "optimizer", "opt_param_scheduler", "iteration"),
        "an end by --exit-duration-in-mins is decided along the pipeline; drains before the end",
    ),
    Patch(
        "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker._sync_metrics",
        _sum_router_metrics,
        ("self", "metric_names", "pg_collection"),
        "router metrics have come along the pipeline; the last stage logs them",
    ),
    Patch(
        "megatron.core.utils:check_param_hashes_across_dp_replicas",
        _check_param_hashes,
        ("model",),
        "drains before weights are compared",
    ),
    Patch(
        "megatron.training.async_utils:maybe_finalize_async_save",
        _maybe_finalize_async_save,
        ("blocking", "terminate"),
        "asks all ranks about an asynchronous save only at drains",
    ),
)
