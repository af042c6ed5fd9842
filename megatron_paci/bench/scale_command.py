"""``python -m megatron_paci bench scale``: how an iteration's time grows with the pipeline."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any

from megatron_paci.bench.emulated import EmulatedRun, schedule_result
from megatron_paci.bench.emulated_command import add_time_arguments, idle_text, read_times
from megatron_paci.bench.wall import measure as measure_runs
from megatron_paci.bench.wall_flags import add_wall_arguments, read_wall_options
from megatron_paci.simulate.reading import Reader
from megatron_paci.simulate.text import table as columns

HELP = "time of an iteration against stages and microbatches in flight, on emulated devices"
DESCRIPTION = (
    "Measure as bench emulated does, with more and more stages and microbatches in flight. An "
    "iteration that costs nothing but its passes takes as long for any number of stages under "
    "PACI; what it takes longer is the cost of the host and of messages. All ranks of a pipeline "
    "share this machine's cores here, so that cost grows with their number by itself: give passes "
    "enough time."
)
SECONDS = 3600


@dataclass(frozen=True)
class Request:
    """What to measure."""

    runs: list[EmulatedRun]
    repetitions: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--stages", metavar="N[,N...]", default="2,4,8,16",
                        help="pipeline stages (default: %(default)s)")
    parser.add_argument("--microbatches", metavar="M[,M...]", default="4",
                        help="microbatches per iteration (default: %(default)s)")
    add_time_arguments(parser)
    parser.set_defaults(forward_ms="100")
    add_wall_arguments(parser, iterations=8, repetitions=3)
    parser.set_defaults(schedules="1f1b,paci")


def read(options: argparse.Namespace, reader: Reader) -> Request:
    """Return what the flags ask for."""
    stages = reader.wholes("stages", options.stages, [])
    counts = reader.wholes("microbatches", options.microbatches, [])
    wall = read_wall_options(options, reader, several_extra=True)
    runs: list[EmulatedRun] = []
    for number in stages:
        times = read_times(options, reader, number, [Fraction(1)] * number)
        for count, schedule in product(counts, wall.schedules):
            run = EmulatedRun(
                stages=number, microbatches=count, **times, **wall.of(schedule)
            )
            extras = wall.extra_in_flight if schedule == "paci" else [0]
            runs += [replace(run, extra_in_flight=extra) for extra in extras]
    if not reader.problems:
        reader.problems += dict.fromkeys(text for run in runs for text in run.problems())
    return Request(runs, wall.repetitions)


def measure(request: Request, seconds: float) -> dict[str, Any]:
    """Return ``rows``, one per run: its parameters and ``emulated.schedule_result``.

    There is one launch per number of stages. ``overhead_ms`` is how much longer an iteration takes
    than by theory, per microbatch.
    """
    end = time.monotonic() + seconds
    rows = []
    for stages in dict.fromkeys(run.stages for run in request.runs):
        runs = [run for run in request.runs if run.stages == stages]
        measured = measure_runs(
            runs, repetitions=request.repetitions, seconds=max(0.0, end - time.monotonic())
        )
        for run, repetitions in zip(runs, measured):
            found = schedule_result(run, repetitions)
            seconds_now = run.microbatches / found["throughput"]
            best = run.predicted_seconds(run.costs)
            rows.append(
                {
                    "stages": stages,
                    "schedule": run.schedule,
                    "extra_in_flight": run.extra_in_flight,
                    "iteration_ms": 1e3 * seconds_now,
                    "overhead_ms": None if best is None
                    else 1e3 * (seconds_now - best) / run.microbatches,
                    **found,
                }
            )
    return {
        "rows": rows,
        "parameters": {
            "repetitions": request.repetitions,
            "runs": [asdict(run) for run in request.runs],
        },
    }


def table(result: dict[str, Any]) -> str:
    """Return a line per run."""
    rows = [("schedule", "stages", "microbatches", "extra in flight", "ms per iteration",
             "utilization", "theory", "ms over theory per microbatch")]
    notes = []
    for found in result["rows"]:
        theory, over = found["theory"], found["overhead_ms"]
        rows.append(
            (
                found["schedule"], str(found["stages"]), str(found["microbatches"]),
                str(found["extra_in_flight"]), f"{found['iteration_ms']:.1f}",
                f"{found['utilization']:.4f}", "-" if theory is None else f"{theory:.4f}",
                "-" if over is None else f"{over:.2f}",
            )
        )
        if found["schedule"] == "paci":
            notes.append(f"paci, {found['stages']} stages, {found['microbatches']} microbatches: "
                         f"{idle_text(found)}")
        if found["overrun"]:
            notes.append(f"{found['schedule']}, {found['stages']} stages: {found['overrun']} "
                         "passes took longer than they should have lasted; give them more time")
    return "\n".join([columns(rows), *notes]) + "\n"
