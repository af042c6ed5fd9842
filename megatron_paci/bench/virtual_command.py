"""``python -m megatron_paci bench virtual``: exact utilization, by logical clocks."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import product
from typing import Any

from megatron_paci.bench.theory import utilization
from megatron_paci.bench.virtual import VirtualRun, simulate
from megatron_paci.bench.virtual import measure as measure_runs
from megatron_paci.simulate.reading import Reader
from megatron_paci.simulate.text import table as columns

HELP = "utilization, idle time and cross-stage collectives in virtual time"
DESCRIPTION = (
    "Train a tiny GPT with megatron.training, one local CPU process per rank, and time it with "
    "logical clocks: a pass costs what is given here, a message takes its sender's time along, a "
    "collective waits for the latest of its group. The numbers are exact and do not depend on the "
    "machine. Several stages, microbatches, schedules and latencies make a table of all of them."
)
SECONDS = 600
# Flags that take several values, and each combination of them is measured.
GRID = ("stages", "microbatches", "schedule", "latency", "extra_in_flight")
CAUSES = ("forward_message", "backward_message", "other_message", "collective")


@dataclass(frozen=True)
class Request:
    """What to measure."""

    runs: list[VirtualRun]
    simulated: bool
    """Whether the simulator is to tell instead."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    default = VirtualRun(stages=1, microbatches=1, schedule="1f1b")

    def flag(name: str, metavar: str, text: str, *others: str, **options: Any) -> None:
        value = getattr(default, name)
        shown = "" if options.get("required") or value in (None, "") else f" (default: {value})"
        options.setdefault("default", value)
        parser.add_argument(
            f"--{name.replace('_', '-')}", *others, metavar=metavar, help=text + shown, **options
        )

    flag("stages", "N[,N...]", "pipeline stages", required=True)
    flag("microbatches", "M[,M...]", "microbatches per iteration", required=True)
    flag("schedule", "{1f1b,interleaved,paci}[,...]", "pipeline schedule", "--schedules",
         required=True)
    flag("latency", "X[,X...]", "virtual time of a message between two stages", "--latencies")
    flag("extra_in_flight", "S[,S...]", "paci: value of --paci-extra-in-flight")
    flag("replicas", "D", "data-parallel copies of the pipeline", type=int)
    flag("tensor", "T", "tensor-parallel size; the model has 2 attention heads", type=int)
    flag("accum", "A", "paci: backward passes per optimizer step (default: M)", type=int)
    flag("chunks", "V", "interleaved: model chunks per stage", type=int)
    flag("forward_time", "X[,X...]", "virtual time of a forward pass, of all or of each stage")
    flag("backward_time", "X[,X...]", "the same for a backward pass")
    flag("step_time", "X[,X...]", "the same for an optimizer step")
    parser.add_argument(
        "--tied-embeddings", action="store_true", help="share them between first and last stage"
    )
    flag("iterations", "K", "iterations to measure", type=int)
    flag(
        "warmup", "K", "iterations before (default: 3, more if the pipeline is longer)", type=int
    )
    flag(
        "megatron_args", '"FLAGS"',
        "more of Megatron's flags, which win over those chosen here; a single one as "
        "--megatron-args=--bf16",
    )
    parser.add_argument(
        "--simulate", action="store_true",
        help="do not train: let the simulator tell the utilization, from the same orders. It "
        "agrees exactly with what is measured, and needs no processes; for many stages",
    )


def read(options: argparse.Namespace, reader: Reader) -> Request:
    """Return the runs that the flags mean, one per combination."""
    grid = {
        "stages": reader.wholes("stages", options.stages, []),
        "microbatches": reader.wholes("microbatches", options.microbatches, []),
        "schedule": options.schedule.split(","),
        "latency": options.latency.split(","),
        "extra_in_flight": [
            reader.whole("extra-in-flight", text, 0, least=0)
            for text in str(options.extra_in_flight).split(",")
        ],
    }
    for latency in grid["latency"]:
        reader.number("latency", latency, Fraction(0))
    names = [name for name in VirtualRun.__dataclass_fields__ if hasattr(options, name)]
    runs = []
    for values in product(*(grid[name] for name in GRID)):
        given = {name: getattr(options, name) for name in names} | dict(zip(GRID, values))
        if given["schedule"] != "paci" and "paci" in grid["schedule"]:
            given |= {"accum": None, "extra_in_flight": 0}
        runs.append(VirtualRun(**given))
    runs = list(dict.fromkeys(runs))
    problems = [run.problems() for run in runs]
    if all(problems) and not reader.problems:  # else what cannot run is a line of the table
        reader.problems += dict.fromkeys(problem for each in problems for problem in each)
    return Request(runs, options.simulate)


def measure(request: Request, seconds: float) -> dict[str, Any]:
    """Return under ``runs`` the parameters of each and what was found, or why it cannot run.

    What was measured in a single run is the result itself.
    """
    runs = request.runs
    end = time.monotonic() + seconds
    results: list[dict[str, Any]] = [
        {"parameters": asdict(run) | {"warmup": run.warmup_iterations}} for run in runs
    ]
    able: dict[int, list[int]] = {}  # Numbers of runs by ranks: one launch for each.
    for number, run in enumerate(runs):
        if problems := run.problems():
            results[number]["refused"] = "; ".join(problems)
        elif request.simulated:
            results[number] |= {"simulated": True, **simulate(run)}
        else:
            able.setdefault(run.num_ranks, []).append(number)
    for numbers in able.values():
        found = measure_runs(
            [runs[number] for number in numbers], seconds=max(0.0, end - time.monotonic())
        )
        for number, result in zip(numbers, found):
            results[number] |= result
    single = len(runs) == 1 and not request.simulated
    return results[0] if single else {"runs": results}


def table(result: dict[str, Any]) -> str:
    """Return the result as text: details of a single run, a line for each of several."""
    return _details(result) if "parameters" in result else _grid(result["runs"])


def _grid(results: Sequence[dict[str, Any]]) -> str:
    rows = [("schedule", "stages", "microbatches", "latency", "extra in flight", "utilization",
             "formula", "collectives")]
    notes = []
    for result in results:
        run = VirtualRun(**result["parameters"])
        formula = float(
            utilization(run.schedule, run.stages, run.microbatches, chunks=run.chunks)
        )
        measured, collectives = "-", "-"
        if "refused" in result:
            notes.append(f"{run.schedule}: {result['refused']}")
        else:
            measured = f"{min(result['utilization']):.4f}"
            if "simulated" not in result:
                collectives = f"{result['cross_stage_collectives']:g}"
        rows.append((run.schedule, str(run.stages), str(run.microbatches), run.latency,
                     str(run.extra_in_flight), measured, f"{formula:.4f}", collectives))
    how = "simulated, " if any("simulated" in result for result in results) else ""
    lines = [
        f"{how}utilization of the least busy stage; formula: equal stages, no latency, no steps; "
        "cross-stage collectives per iteration",
        columns(rows),
        *dict.fromkeys(notes),
    ]
    return "\n".join(lines) + "\n"


def _details(result: dict[str, Any]) -> str:
    """Return a line per stage, then a line per cross-stage collective."""
    run = VirtualRun(**result["parameters"])
    accum = f", accumulation {run.accum or run.microbatches}" if run.schedule == "paci" else ""
    replicas = f", {run.replicas} replicas" if run.replicas > 1 else ""
    tensor = f", tensor parallel {run.tensor}" if run.tensor > 1 else ""
    chunks = f", {run.chunks} chunks" if run.schedule == "interleaved" else ""
    names = [cause.replace("_", " ") for cause in CAUSES]
    rows = [("stage", "utilization", "schedule alone", *names)]
    for stage, idle in enumerate(result["idle"]):
        rows.append(
            (
                str(stage),
                f"{result['utilization'][stage]:.4f}",
                f"{result['schedule_utilization'][stage]:.4f}",
                *(f"{idle[cause] / run.iterations:.3f}" for cause in CAUSES),
            )
        )
    lines = [
        f"{run.schedule}: {run.stages} stages{replicas}{tensor}, {run.microbatches} microbatches"
        f"{accum}{chunks}; idle time per iteration by cause",
        columns(rows),
        "cross-stage collectives per steady-state iteration: "
        f"{result['cross_stage_collectives']:g}",
    ]
    for entry in result["call_sites"]:
        chain = " <- ".join([entry["site"], *entry["callers"]])
        lines.append(f"  {entry['per_iteration']:g} {entry['call']}  {chain}")
    return "\n".join(lines) + "\n"
