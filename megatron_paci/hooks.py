"""Where the plugin enters Megatron: every hooked function, once, with the reason.

Nothing else imports this module. With ``--pipeline-schedule`` left at ``auto`` every wrapper only
calls the original.
"""

from __future__ import annotations

import inspect
import logging
import sys
from argparse import Namespace
from contextlib import nullcontext
from datetime import timedelta

import megatron.core
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, training

from megatron_paci import compatibility
from megatron_paci.accumulation import SYNC, accumulation_at
from megatron_paci.arguments import add_paci_arguments, selected_schedule
from megatron_paci.build import MegatronStage, install_stage, installed_stage
from megatron_paci.data_helpers import ensure_helpers
from megatron_paci.forward_backward import forward_backward_pipelining_paci
from megatron_paci.loop import LOOP_PATCHES, drain, exit_wishes
from megatron_paci.observe import Observer, observer, wants_telemetry
from megatron_paci.patching import Patch, PatchSet
from megatron_paci.record import Recorder
from megatron_paci.source_hooks import in_source
from megatron_paci.train_step import paci_train_step
from megatron_paci.watchdog import LAST_WORDS, Watchdog

logger = logging.getLogger(__name__)

_recorder: Recorder | None = None
_hooked_in_source = False
_observer: Observer | None = None


def _get_forward_backward_func(original, *args, **kwargs):
    if installed_stage() is not None or _schedule() == "paci":
        return forward_backward_pipelining_paci
    return original(*args, **kwargs)


def _schedule() -> str:
    try:
        return selected_schedule(get_args())
    except AssertionError:  # Megatron-Core without megatron.training: no arguments were parsed
        return "auto"


def _accumulation() -> int:
    """Return the accumulation of the iteration that begins, ``SYNC`` for Megatron's own 1F1B."""
    args = get_args()
    return accumulation_at(args, args.consumed_train_samples, get_num_microbatches())


def _add_megatron_arguments(original, parser):
    return add_paci_arguments(original(parser))


def _parse_args(original, *args, **kwargs):
    parsed = original(*args, **kwargs)
    compatibility.check_parsed(parsed, sys.argv[1:])
    return parsed


def _validate_args(original, args, defaults=None, **kwargs):
    # Every rank imports the data-index helper; Megatron builds it on the first one alone.
    ensure_helpers(build=lambda: None)
    if hasattr(args, "pipeline_schedule"):  # else parsed before the plugin was there
        # What a launch script sets for flags that were not given counts as well.
        given = {name: value for name, value in vars(args).items() if value is not None}
        compatibility.check(Namespace(**{**vars(args), **(defaults or {}), **given}))
        if selected_schedule(args) == "paci":
            compatibility.take_over(args)
            compatibility.warn_unproved(args)
            compatibility.warn_of_delay(args)
    return original(args, defaults or {}, **kwargs)


def _train(original, *args, **kwargs):
    global _recorder, _observer
    arguments = get_args()
    call = inspect.signature(original).bind(*args, **kwargs).arguments
    model, optimizer = call["model"], call["optimizer"]
    _recorder = None
    if getattr(arguments, "paci_record", None):
        _recorder = Recorder(
            arguments.paci_record, model, optimizer, call.get("valid_data_iterator")
        )
    stage = watchdog = None
    if selected_schedule(arguments) == "paci":
        compatibility.check_call(call)
        stage = MegatronStage(
            model,
            optimizer,
            call["opt_param_scheduler"],
            accumulation=_accumulation() or get_num_microbatches(),
            extra_in_flight=arguments.paci_extra_in_flight,
            defer_step=arguments.paci_defer_step,
            clip=arguments.paci_clip,
            nonfinite=arguments.paci_nonfinite,
            exit_wishes=exit_wishes
            if arguments.exit_signal_handler or arguments.exit_duration_in_mins
            else None,
            timeout=timedelta(minutes=arguments.distributed_timeout_minutes),
            telemetry=wants_telemetry(arguments),
        )
        install_stage(stage)
        watchdog = Watchdog(
            stage.activity.describe,
            stage.activity.progress,
            stall_seconds=arguments.paci_stall_seconds
            or 60 * LAST_WORDS * arguments.distributed_timeout_minutes,
        )
        watchdog.start()
    try:
        _observer = observer(model[0], optimizer, stage)
        with _doing("between iterations"):
            result = original(*args, **kwargs)
        drain()
        if stage is not None:
            stage.lend_tied_state()  # Megatron may save once more, after training
            stage.destroy_groups()
        return result
    except SystemExit:
        # Megatron leaves training by this for --exit-interval and the like, on all ranks at the
        # same iteration: let the microbatches in flight come home before the links close. One that
        # comes out of an action is this rank's alone, and nobody else would drain.
        if stage is not None and not stage.engine.interrupted:
            stage.drain()
        raise
    finally:
        if _observer is not None:
            _observer.close()
            _observer = None
        if _recorder is not None:
            _recorder.write(stage and stage.engine.statistics())
        if stage is not None:
            watchdog.stop()
            install_stage(None)
            stage.close()


def _train_step(original, *args, **kwargs):
    stage = installed_stage()
    if stage is None:
        step = original
    elif _accumulation() == SYNC:
        stage.suspend()
        step = stage.activity.doing("training by Megatron's own 1F1B")(original)
    else:
        stage.resume()
        step = paci_train_step
    with nullcontext() if _recorder is None else _recorder.counting():
        result = step(*args, **kwargs)
    if _recorder is not None:
        _recorder.iteration(result)
    if _observer is not None:
        iteration = get_args().curr_iteration + 1
        result = (_observer.iteration(result[0], iteration), *result[1:])
    return result


def _evaluate(original, *args, **kwargs):
    drain()
    with _doing("evaluating"), _span("evaluate"):
        result = original(*args, **kwargs)
    if _recorder is not None:
        call = inspect.signature(original).bind(*args, **kwargs).arguments
        _recorder.evaluation(result, call.get("data_iterator"))
    return result


def _save_checkpoint_and_time(original, *args, **kwargs):
    stage = installed_stage()
    if stage is None:
        with _span("checkpoint"):
            return original(*args, **kwargs)
    with stage.checkpoint(), _span("checkpoint"):
        # Nobody has asked since the stream began: let an asynchronous checkpoint that is written by
        # now count as complete before the next one begins.
        training.maybe_finalize_async_save()
        return original(*args, **kwargs)


def _doing(what):
    stage = installed_stage()
    return nullcontext() if stage is None else stage.activity.doing(what)


def _span(kind):
    return nullcontext() if _observer is None else _observer.span(kind)


TRAINING = "megatron.training.training"

PATCHES = PatchSet(
    (
        Patch(
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            _get_forward_backward_func,
            ("pp_size", "vp_size"),
            "hands out the PACI schedule",
        ),
        Patch(
            "megatron.training.arguments:add_megatron_arguments",
            _add_megatron_arguments,
            ("parser",),
            "adds the flags",
        ),
        Patch(
            "megatron.training.arguments:parse_args",
            _parse_args,
            ("extra_args_provider",),
            "refuses a choice of schedule that a YAML file would drop",
        ),
        Patch(
            "megatron.training.arguments:validate_args",
            _validate_args,
            ("args", "defaults"),
            "refuses what cannot run, before any process group is made",
        ),
        Patch(
            f"{TRAINING}:train",
            _train,
            ("forward_step_func", "model", "optimizer", "opt_param_scheduler"),
            "builds the stage before the loop and takes it apart after it",
        ),
        Patch(
            f"{TRAINING}:train_step",
            _train_step,
            (
                "forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler",
                "config", "forward_backward_func",
            ),
            "leaves the optimizer to the schedule, reduces nothing over stages",
        ),
        Patch(
            f"{TRAINING}:evaluate",
            _evaluate,
            ("forward_step_func", "data_iterator", "model"),
            "drains before evaluation",
        ),
        Patch(
            f"{TRAINING}:save_checkpoint_and_time",
            _save_checkpoint_and_time,
            ("iteration", "model", "optimizer", "opt_param_scheduler"),
            "drains before a checkpoint",
        ),
        Patch(
            "megatron.core.datasets.utils:compile_helpers",
            ensure_helpers,
            (),
            "does not build the data-index helper that the wheel brings already built",
        ),
        *LOOP_PATCHES,
    )
)


def install() -> None:
    """Install all hooks; see ``megatron_paci.install``."""
    global _hooked_in_source
    if PATCHES.installed or _hooked_in_source:
        return
    _hooked_in_source = in_source(PATCHES)
    if not _hooked_in_source:
        PATCHES.install()
    compatibility.warn_untried_version(megatron_version())


def megatron_version() -> str:
    """Return the release of Megatron-Core, without the commit that Megatron adds to it.

    It adds that of any git checkout its files lie in, also if that is only around a ``.venv``.
    """
    return megatron.core.__version__.partition("+")[0]


def uninstall() -> None:
    """Take all hooks out; see ``megatron_paci.uninstall``."""
    if installed_stage() is not None:
        raise RuntimeError("cannot uninstall while training runs under PACI")
    if _hooked_in_source:
        logger.warning("the hooks stand in the source of this Megatron and stay; to take them out: "
                       "python patches/apply.py <checkout> --revert")
    PATCHES.uninstall()
