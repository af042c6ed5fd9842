"""The command line: ``python -m megatron_paci bench virtual ...``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_paci.bench.ranks import RankError
from megatron_paci.bench.virtual import VirtualRun, measure
from megatron_paci.version import versions

USAGE_ERROR = 2
FAILURE = 1
INTERRUPTED = 130
PARAMETERS = tuple(VirtualRun.__dataclass_fields__)


def add_bench_command(commands: Any) -> None:
    """Add ``bench`` to the subcommands of the package."""
    bench = commands.add_parser("bench", help="measure pipeline schedules on this machine's CPUs")
    benchmarks = bench.add_subparsers(dest="benchmark", required=True)
    virtual = benchmarks.add_parser(
        "virtual",
        help="utilization, idle time and cross-stage collectives in virtual time",
        description="Train a tiny GPT with megatron.training, one local CPU process per rank, "
        "and time it with logical clocks: a pass costs what is given here, a message takes its "
        "sender's time along, a collective waits for the latest of its group. The numbers are "
        "exact and do not depend on the machine.",
    )
    virtual.set_defaults(run=run_virtual)
    default = VirtualRun(stages=1, microbatches=1, schedule="1f1b")

    def flag(name: str, metavar: str, text: str, **options: Any) -> None:
        value = getattr(default, name)
        shown = "" if options.get("required") or value in (None, "") else f" (default: {value})"
        options.setdefault("default", value)
        virtual.add_argument(
            f"--{name.replace('_', '-')}", metavar=metavar, help=text + shown, **options
        )

    flag("stages", "N", "pipeline stages", type=int, required=True)
    flag("microbatches", "M", "microbatches per iteration", type=int, required=True)
    flag("schedule", "{1f1b,interleaved,paci}", "pipeline schedule", required=True)
    flag("replicas", "D", "data-parallel copies of the pipeline", type=int)
    flag("tensor", "T", "tensor-parallel size; the model has 2 attention heads", type=int)
    flag("accum", "A", "paci: backward passes per optimizer step (default: M)", type=int)
    flag(
        "extra_in_flight", "S",
        "paci: more microbatches in flight for each link between a stage and the last one",
        type=int,
    )
    flag("chunks", "V", "interleaved: model chunks per stage", type=int)
    flag("latency", "X", "virtual time of a message between two stages")
    flag("forward_time", "X[,X...]", "virtual time of a forward pass, of all or of each stage")
    flag("backward_time", "X[,X...]", "the same for a backward pass")
    flag("step_time", "X[,X...]", "the same for an optimizer step")
    virtual.add_argument(
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
    virtual.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=600, help="limit (default: 600)"
    )
    virtual.add_argument("--json", metavar="FILE", required=True, help="file for the result")


def run_virtual(options: argparse.Namespace, argv: list[str]) -> int:
    """Measure, write the JSON file and print a table; return the exit status.

    Args:
        options: Parsed command line.
        argv: The command line as it was, for the record.
    """
    run = VirtualRun(
        **{name: getattr(options, name) for name in PARAMETERS if hasattr(options, name)}
    )
    path = Path(options.json)
    problems = run.problems() + _problems_of_path(path)
    if not options.timeout > 0:
        problems.append(f"--timeout {options.timeout:g}: give seconds, more than 0")
    if problems:
        for problem in problems:
            sys.stderr.write(f"megatron_paci: error: {problem}\n")
        return USAGE_ERROR
    try:
        [result] = measure([run], seconds=options.timeout)
    except RankError as error:
        sys.stderr.write(f"megatron_paci: error: {error}\n")
        return FAILURE
    except KeyboardInterrupt:
        sys.stderr.write("megatron_paci: interrupted; all ranks are stopped\n")
        return INTERRUPTED
    record = {
        "benchmark": "virtual",
        "command": ["python", "-m", "megatron_paci", *argv],
        "parameters": asdict(run) | {"warmup": run.warmup_iterations},
        "versions": versions(),
        **result,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(table(run, result))
    return 0


def _problems_of_path(path: Path) -> list[str]:
    folder = path.parent
    if path.is_dir():
        return [f"--json {path}: is a folder; give the name of a file"]
    if not folder.is_dir():
        return [f"--json {path}: there is no folder {folder}; create it, or choose another"]
    if not os.access(path if path.exists() else folder, os.W_OK):
        return [f"--json {path}: cannot be written; choose another place"]
    return []


def table(run: VirtualRun, result: dict[str, Any]) -> str:
    """Return the result as text: a line per stage, then a line per cross-stage collective."""
    accum = f", accumulation {run.accum or run.microbatches}" if run.schedule == "paci" else ""
    if run.extra_in_flight:
        accum += f", {run.extra_in_flight} more in flight per link"
    replicas = f", {run.replicas} replicas" if run.replicas > 1 else ""
    tensor = f", tensor parallel {run.tensor}" if run.tensor > 1 else ""
    chunks = f", {run.chunks} chunks" if run.schedule == "interleaved" else ""
    causes = ("forward_message", "backward_message", "other_message", "collective")
    names = [cause.replace("_", " ") for cause in causes]
    rows = [("stage", "utilization", "schedule alone", *names)]
    for stage, idle in enumerate(result["idle"]):
        rows.append(
            (
                str(stage),
                f"{result['utilization'][stage]:.4f}",
                f"{result['schedule_utilization'][stage]:.4f}",
                *(f"{idle[cause] / run.iterations:.3f}" for cause in causes),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        f"{run.schedule}: {run.stages} stages{replicas}{tensor}, {run.microbatches} microbatches"
        f"{accum}{chunks}; idle time per iteration by cause",
        *("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows),
        "cross-stage collectives per steady-state iteration: "
        f"{result['cross_stage_collectives']:g}",
    ]
    for entry in result["call_sites"]:
        chain = " <- ".join([entry["site"], *entry["callers"]])
        lines.append(f"  {entry['per_iteration']:g} {entry['call']}  {chain}")
    return "\n".join(lines) + "\n"
