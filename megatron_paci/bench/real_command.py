"""``python -m megatron_paci bench real``: tokens per second of a small GPT on this machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from megatron_paci.bench.real import RealRun, results_of
from megatron_paci.bench.wall import measure as measure_runs
from megatron_paci.bench.wall_flags import add_wall_arguments, read_wall_options
from megatron_paci.simulate.reading import Reader
from megatron_paci.simulate.text import table as columns

HELP = "tokens per second of a small GPT, beside theory and the simulator"
DESCRIPTION = (
    "Train a small GPT with megatron.training, one local CPU process with one thread per stage, "
    "and show how many times as fast each schedule is as 1F1B: measured, by the formulas for equal "
    "stages, and by the simulator with the times of passes and steps that were measured here. "
    "Needs a core per stage."
)
SECONDS = 3600
# Name of the flag and the field, default, help.
MODEL = (
    ("layers", 8, "transformer layers of the model"),
    ("hidden", 256, "hidden size"),
    ("heads", 4, "attention heads"),
    ("sequence", 256, "tokens per sequence"),
    ("vocab", 512, "size of the vocabulary"),
    ("micro_batch", 1, "sequences per microbatch"),
)


@dataclass(frozen=True)
class Request:
    """What to measure."""

    runs: dict[tuple[int, str], RealRun]
    """By microbatches and schedule."""
    refused: dict[tuple[int, str], str]
    """Why a combination cannot run."""
    repetitions: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--stages", metavar="N", default="2",
                        help="pipeline stages (default: %(default)s)")
    parser.add_argument("--microbatches", metavar="M[,M...]", default="1,2,4,8",
                        help="microbatches per iteration (default: %(default)s)")
    for name, default, text in MODEL:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="X", default=str(default),
                            help=f"{text} (default: %(default)s)")
    add_wall_arguments(parser, iterations=10, repetitions=5)


def read(options: argparse.Namespace, reader: Reader) -> Request:
    """Return what the flags ask for."""
    stages = reader.whole("stages", options.stages, 2)
    counts = reader.wholes("microbatches", options.microbatches, [])
    model = {
        name: reader.whole(name.replace("_", "-"), getattr(options, name), default)
        for name, default, _ in MODEL
    }
    wall = read_wall_options(options, reader)
    runs, refused = {}, {}
    if not reader.problems:
        for count in dict.fromkeys(counts):
            for schedule in wall.schedules:
                run = RealRun(stages=stages, microbatches=count, **model, **wall.of(schedule))
                if schedule == "interleaved" and stages > 1 and count % stages:
                    refused[count, schedule] = (
                        "Megatron's interleaved schedule needs a multiple of "
                        f"{stages} microbatches"
                    )
                else:
                    runs[count, schedule] = run
        reader.problems += dict.fromkeys(
            text for run in runs.values() for text in run.problems()
        )
        if not runs and not reader.problems:
            reader.refuse("microbatches", options.microbatches,
                          f"interleaved alone needs a multiple of {stages}; give one")
    return Request(runs, refused, wall.repetitions)


def measure(request: Request, seconds: float) -> dict[str, Any]:
    """Return under ``microbatches``, by number and schedule, what ``real.results_of`` makes.

    A combination that cannot run has the ``reason`` alone.
    """
    found = measure_runs(
        list(request.runs.values()), repetitions=request.repetitions, seconds=seconds
    )
    measured = dict(zip(request.runs, found))
    results: dict[str, Any] = {}
    for count in dict.fromkeys(count for count, _ in (*request.runs, *request.refused)):
        keys = [key for key in request.runs if key[0] == count]
        results[str(count)] = results_of(
            {name: request.runs[_, name] for _, name in keys},
            {name: measured[_, name] for _, name in keys},
        )
    for (count, schedule), reason in request.refused.items():
        results[str(count)][schedule] = {"tokens_per_second": None, "reason": reason}
    return {
        "microbatches": results,
        "parameters": {
            "repetitions": request.repetitions,
            "runs": [asdict(run) for run in request.runs.values()],
        },
    }


def table(result: dict[str, Any]) -> str:
    """Return a line per number of microbatches and schedule."""
    rows = [("schedule", "microbatches", "tokens/s", "over 1F1B", "formula", "simulator",
             "of simulator", "forward, backward, step in ms")]
    notes = []
    for count, schedules in result["microbatches"].items():
        for name, found in schedules.items():
            if "reason" in found:
                notes.append(f"{name}, {count} microbatches: {found['reason']}")
                continue
            times = " | ".join(
                " ".join(f"{1e3 * cost[key]:.1f}" for key in ("forward", "backward", "step"))
                for cost in found["costs"]
            )
            ratios = [
                f"{found[key]:.3f}" if key in found else "-"
                for key in ("ratio", "ratio_theory", "ratio_predicted", "of_predicted")
            ]
            rows.append((name, count, f"{found['tokens_per_second']:.0f}", *ratios, times))
    return "\n".join([columns(rows), *notes]) + "\n"
