"""``python -m megatron_paci bench emulated``: real schedules and messages on emulated devices."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from megatron_paci.bench.emulated import (
    EmulatedRun,
    add_ratios,
    next_multiple,
    schedule_result,
)
from megatron_paci.bench.wall import measure as measure_runs
from megatron_paci.bench.wall_flags import add_wall_arguments, read_wall_options
from megatron_paci.simulate.reading import Reader
from megatron_paci.simulate.text import table as columns
from megatron_paci.trace import CAUSES

HELP = "schedules on emulated devices: real time and messages, passes that sleep"
DESCRIPTION = (
    "Train a tiny GPT with megatron.training, one local CPU process per stage, where every forward "
    "and backward lasts as long as is given here, asleep for most of it, so that more stages than "
    "cores can be measured. Schedules, messages, optimizer steps and all that Megatron's training "
    "loop does are real; the time of the host comes on top of that of the passes, as nothing runs "
    "ahead of an emulated device. Utilization is the useful time of the slowest stage per "
    "iteration over the measured time of an iteration in the steady state; filling and the last "
    "drain of PACI are left out."
)
SECONDS = 1800


@dataclass(frozen=True)
class Request:
    """What to measure."""

    runs: dict[str, EmulatedRun]
    """By schedule."""
    repetitions: int
    instead: dict[str, str]
    """Why a schedule is measured with other microbatches than asked for."""
    microbatches: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--stages", metavar="N", required=True, help="pipeline stages")
    parser.add_argument(
        "--microbatches", metavar="M", required=True, help="microbatches per iteration"
    )
    add_time_arguments(parser)
    parser.add_argument(
        "--slow-stage", metavar="I:FACTOR",
        help="a stage (from 0) whose passes take so many times as long",
    )
    parser.add_argument(
        "--stage-factors", metavar="X[,X...]",
        help="how many times as long the passes of each stage take (default: 1)",
    )
    add_wall_arguments(parser, iterations=8, repetitions=3)


def add_time_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the times of passes and steps."""
    parser.add_argument(
        "--forward-ms", metavar="T[,T...]", default="50",
        help="time of a forward pass, of all or of each stage; a chunk of an interleaved schedule "
        "takes its share (default: %(default)s)",
    )
    parser.add_argument(
        "--backward-ms", metavar="T[,T...]",
        help="the same for a backward pass (default: twice the forward)",
    )
    parser.add_argument(
        "--step-ms", metavar="T[,T...]", default="0",
        help="the same for an optimizer step; 0: as long as that of the tiny model takes "
        "(default: %(default)s)",
    )


def read_times(
    options: argparse.Namespace, reader: Reader, num_stages: int, factors: list[Fraction]
) -> dict[str, tuple[float, ...]]:
    """Return the seconds of ``forward``, ``backward`` and ``step`` per stage."""
    forward = reader.stages("forward-ms", options.forward_ms, num_stages, Fraction(50))
    backward = reader.stages("backward-ms", options.backward_ms, num_stages, Fraction(0))
    if options.backward_ms is None:
        backward = tuple(2 * time for time in forward)
    for flag, times in (("forward-ms", forward), ("backward-ms", backward)):
        if not all(times):
            reader.refuse(flag, 0, "a pass takes time; give more than 0")
    step = reader.stages("step-ms", options.step_ms, num_stages, Fraction(0))
    return {
        "forward": tuple(float(time * times / 1000) for time, times in zip(forward, factors)),
        "backward": tuple(float(time * times / 1000) for time, times in zip(backward, factors)),
        "step": tuple(float(time / 1000) for time in step),
    }


def read(options: argparse.Namespace, reader: Reader) -> Request:
    """Return what the flags ask for."""
    stages = reader.whole("stages", options.stages, 1)
    microbatches = reader.whole("microbatches", options.microbatches, 1)
    factors = list(reader.stages("stage-factors", options.stage_factors, stages, Fraction(1)))
    _slow_down(options.slow_stage, factors, reader)
    times = read_times(options, reader, stages, factors)
    wall = read_wall_options(options, reader)
    runs, instead = {}, {}
    for schedule in wall.schedules:
        run = EmulatedRun(
            stages=stages, microbatches=microbatches, **times, **wall.of(schedule)
        )
        if schedule == "interleaved" and stages > 1 and microbatches % stages:
            run = replace(run, microbatches=next_multiple(microbatches, stages))
            instead[schedule] = (
                f"Megatron's interleaved schedule needs a multiple of {stages} microbatches; "
                f"measured with {run.microbatches}"
            )
        runs[schedule] = run
    if not reader.problems:
        reader.problems += dict.fromkeys(text for run in runs.values() for text in run.problems())
    return Request(runs, wall.repetitions, instead, microbatches)


def _slow_down(text: str | None, factors: list[Fraction], reader: Reader) -> None:
    """Multiply the factor of the slow stage."""
    if text is None:
        return
    try:
        stage, factor = text.split(":")
        number, times = int(stage), Fraction(factor)
        if not (0 <= number < len(factors) and times > 0):
            raise ValueError
    except (ValueError, ZeroDivisionError):
        reader.refuse(
            "slow-stage", text,
            f"give a stage from 0 to {len(factors) - 1} and a factor, such as 1:1.5",
        )
        return
    factors[number] *= times


def measure(request: Request, seconds: float) -> dict[str, Any]:
    """Return a result per schedule (``emulated.schedule_result``, ``emulated.add_ratios``).

    A schedule that cannot run with the microbatches asked for has None for ``utilization`` and
    ``throughput``, the ``reason``, ``theory`` with the microbatches asked for, and what was
    measured with others under ``instead``.
    """
    found = measure_runs(
        list(request.runs.values()), repetitions=request.repetitions, seconds=seconds
    )
    measured = dict(zip(request.runs, found))
    results = {name: schedule_result(run, measured[name]) for name, run in request.runs.items()}
    for name, reason in request.instead.items():
        asked = replace(request.runs[name], microbatches=request.microbatches)
        results[name] = {
            "microbatches": asked.microbatches, "utilization": None, "throughput": None,
            "theory": asked.theory, "reason": reason, "instead": results[name],
        }
    add_ratios(request.runs, measured, results)
    return {
        "schedules": results,
        "parameters": {
            "repetitions": request.repetitions,
            "microbatches": request.microbatches,
            "runs": {name: asdict(run) for name, run in request.runs.items()},
        },
    }


def table(result: dict[str, Any]) -> str:
    """Return a line per schedule, and where the time of the slowest stage went."""
    rows = [("schedule", "microbatches", "utilization", "theory", "microbatches/s", "over 1F1B",
             "theory")]
    notes = []
    for name, found in result["schedules"].items():
        rows.append(
            (
                name, str(found["microbatches"]), _shown(found["utilization"]),
                _shown(found["theory"]), _shown(found["throughput"], 3),
                _shown(found["ratio"], 3), _shown(found["ratio_theory"], 3),
            )
        )
        if other := found.get("instead"):
            rows.append(
                ("", str(other["microbatches"]), _shown(other["utilization"]),
                 _shown(other["theory"]), _shown(other["throughput"], 3), "-", "-")
            )
            notes.append(f"{name}: {found['reason']}")
        measured = other or found
        notes.append(f"{name}: {idle_text(measured)}")
        if measured["overrun"]:
            notes.append(
                f"{name}: {measured['overrun']} passes took longer than they should have lasted; "
                "give them more time"
            )
    return "\n".join([columns(rows), *notes]) + "\n"


def idle_text(found: dict[str, Any]) -> str:
    """Return where the time of an iteration went besides passes, on the slowest stage."""
    by_stage = found["utilization_by_stage"]
    stage = by_stage.index(max(by_stage))
    spent = found["seconds_by_cause"][stage]
    parts = [
        f"{1e3 * seconds:.1f} ms {CAUSES[cause].removeprefix('idle: ')}"
        for cause, seconds in spent.items()
        if cause not in ("F", "B") and seconds >= 5e-5
    ]
    return f"per iteration, stage {stage}, besides passes: {', '.join(parts) or 'nothing'}"


def _shown(value: float | None, decimals: int = 4) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"
