"""Rules on the choice of the schedule, and what every rule is made of.

The rules read Megatron's arguments as they were parsed, before Megatron validates and rewrites
them, so that a refused run ends before any process group, data set or model is made. Those on
Megatron's features are in refused.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_paci.arguments import SCHEDULES, is_whole
from megatron_paci.windows import phases_fault, windows


@dataclass(frozen=True)
class Rule:
    """One combination that is refused."""

    feature: str
    """The feature, as a user knows it."""

    arguments: tuple[str, ...]
    """Names in the parsed arguments that the rule judges; its message names those in use."""

    violated: Callable[[argparse.Namespace], bool]
    """Whether parsed arguments break the rule."""

    reason: str
    """Why it cannot work, a template over ``args``, ``counts`` and ``divisors``."""

    remedy: str
    """What to do instead, likewise, and over ``flags``, the flags in use."""


def is_set(*names: str) -> Callable[[argparse.Namespace], bool]:
    """Return a predicate: one of the arguments ``names`` is switched on or has a value."""
    off = (None, False, 0, "none", [], "")
    return lambda args: any(getattr(args, name, None) not in off for name in names)


def refuse(feature: str, arguments: str, reason: str, remedy: str = "drop {flags}") -> Rule:
    """Return the rule that refuses whichever of the blank-separated ``arguments`` is set."""
    names = tuple(arguments.split())
    return Rule(feature, names, is_set(*names), reason, remedy)


def more_than_one(name: str) -> Callable[[argparse.Namespace], bool]:
    """Return a predicate: the argument ``name`` is a number above 1."""
    return lambda args: (getattr(args, name, None) or 1) > 1


def has_virtual_stages(args: argparse.Namespace) -> bool:
    """Whether the flags ask for more than one model chunk per pipeline rank."""
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if layout is not None:
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout,
        )

        try:
            stages = PipelineParallelLayerLayout.get_num_stages_from_str(layout)
        except AssertionError:  # not a layout; Megatron says so itself
            return False
        return stages > args.pipeline_model_parallel_size
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        # "|" ends a stage; what follows "/" are the layers of multi-token prediction.
        layers = (getattr(args, name, None) or "").split("/")[0]
        if layers.count("|") >= args.pipeline_model_parallel_size:
            return True
    return is_set(
        "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
    )(args)


def _writable(what: str, name: str) -> Rule:
    """Return the rule that the folder which the argument ``name`` gives can be written to."""

    def violated(args: argparse.Namespace) -> bool:
        folder = getattr(args, name, None)
        if folder is None:
            return False
        path = Path(folder).absolute()
        while not os.path.lexists(path):
            path = path.parent
        return not (path.is_dir() and os.access(path, os.W_OK | os.X_OK))

    return Rule(
        f"{what} in a folder that cannot be written to", (name,), violated,
        "this is no folder that can be written to or made", "give another folder",
    )


def _bad_accumulation(args: argparse.Namespace) -> bool:
    return args.paci_accum is not None and not is_whole(args.paci_accum, at_least=1)


def _indivisible(args: argparse.Namespace) -> bool:
    return any(count % size for _, size, count in windows(args))


SELECTION_RULES = (
    Rule(
        "a schedule that does not exist",
        ("pipeline_schedule",),
        lambda args: args.pipeline_schedule not in SCHEDULES,
        "there is no such schedule",
        "take one of " + ", ".join(SCHEDULES),
    ),
    Rule(
        "1F1B with virtual stages",
        ("pipeline_schedule",),
        lambda args: args.pipeline_schedule == "1f1b" and has_virtual_stages(args),
        "with several model chunks per rank Megatron runs its interleaved schedule",
        "drop the virtual-stage flags, or take --pipeline-schedule interleaved",
    ),
    Rule(
        "interleaved 1F1B without virtual stages",
        ("pipeline_schedule",),
        lambda args: args.pipeline_schedule == "interleaved" and not has_virtual_stages(args),
        "needs several model chunks per rank",
        "add e.g. --num-virtual-stages-per-pipeline-rank 2",
    ),
    Rule(
        "interleaved 1F1B without a pipeline",
        ("pipeline_schedule",),
        lambda args: args.pipeline_schedule == "interleaved"
        and args.pipeline_model_parallel_size == 1,
        "there is only one pipeline stage",
        "add e.g. --pipeline-model-parallel-size 2",
    ),
    Rule(
        "a window, its step or a watchdog under another schedule",
        ("paci_accum", "paci_accum_schedule", "paci_extra_in_flight", "paci_defer_step",
         "paci_stall_seconds"),
        lambda args: args.pipeline_schedule in SCHEDULES[:-1]
        and (
            args.paci_accum is not None
            or args.paci_accum_schedule is not None
            or args.paci_extra_in_flight != 0
            or args.paci_defer_step
            or args.paci_stall_seconds != 0
        ),
        "has no meaning under --pipeline-schedule {args.pipeline_schedule}",
        "add --pipeline-schedule paci, or drop {flags}",
    ),
    _writable("a record", "paci_record"),
    _writable("a trace", "paci_trace"),
)

WINDOW_RULES = (
    Rule(
        "a window that is no number",
        ("paci_accum",),
        _bad_accumulation,
        "not a whole number of at least 1",
        "give the backward passes per optimizer step, e.g. --paci-accum 4",
    ),
    Rule(
        "a window that does not divide the iteration",
        ("paci_accum",),
        lambda args: args.paci_accum_schedule is None and _indivisible(args),
        "does not divide the {counts} microbatches of an iteration "
        "(global batch / (micro batch * data parallel)), so drains would fall inside a window",
        "take --paci-accum {divisors}, or change --global-batch-size",
    ),
    Rule(
        "phases that cannot be read",
        ("paci_accum_schedule",),
        lambda args: phases_fault(args) != "",
        "{phases_fault}",
        "write accumulations and samples like sync:0,4:20000,8:100000, the first from sample 0 on",
    ),
    Rule(
        "phases whose windows do not divide the iteration",
        ("paci_accum_schedule",),
        lambda args: args.paci_accum_schedule is not None and _indivisible(args),
        "an accumulation has to divide the microbatches of an iteration (global batch / (micro "
        "batch * data parallel)): {indivisible}",
        "take other accumulations or samples, or change the batch size",
    ),
    Rule(
        "two accumulations",
        ("paci_accum", "paci_accum_schedule"),
        lambda args: args.paci_accum is not None and args.paci_accum_schedule is not None,
        "both say how many backward passes a stage accumulates",
        "drop --paci-accum",
    ),
    Rule(
        "a number of microbatches in flight that is none",
        ("paci_extra_in_flight",),
        lambda args: not is_whole(args.paci_extra_in_flight, at_least=0),
        "not a whole number of at least 0",
        "give how many more microbatches are in flight for each link to the last stage, e.g. "
        "--paci-extra-in-flight 1",
    ),
    Rule(
        "a watchdog without a time",
        ("paci_stall_seconds",),
        lambda args: not is_whole(args.paci_stall_seconds, at_least=0),
        "not a whole number of at least 0",
        "give seconds, e.g. --paci-stall-seconds 60",
    ),
    Rule(
        "a watchdog that comes too late",
        ("paci_stall_seconds",),
        lambda args: is_whole(args.paci_stall_seconds, at_least=0)
        and args.paci_stall_seconds >= 60 * args.distributed_timeout_minutes,
        "--distributed-timeout-minutes ends the run before",
        "give fewer seconds, or drop {flags}: it then speaks up shortly before the time-out",
    ),
)
