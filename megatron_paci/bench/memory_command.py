"""``python -m megatron_paci bench memory``: its flags and its table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_paci.bench import memory
from megatron_paci.bench.memory import COUNTED_ITERATIONS, SCHEDULES, WEIGHTS, MemoryRun
from megatron_paci.simulate.reading import Reader

HELP = "peak memory of every stage: weights, activations, messages"
DESCRIPTION = (
    "Train a tiny GPT with megatron.training, one local CPU process per stage, under 1F1B and "
    "under PACI, and count the bytes of tensors on every stage: parameters, gradients and "
    "optimizer state; the peak of what autograd keeps for backward passes; the peak of what "
    "messages take, among them the received inputs of microbatches in flight. The numbers are "
    "exact and do not depend on the machine."
)
SECONDS = 600.0
DEFAULT = MemoryRun()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the benchmark."""
    parser.add_argument("--stages", metavar="N", help=f"pipeline stages ({DEFAULT.stages})")
    parser.add_argument(
        "--microbatches", metavar="M",
        help=f"microbatches per iteration ({DEFAULT.microbatches}); with fewer than stages 1F1B "
        "has fewer in flight than PACI",
    )
    parser.add_argument("--accum", metavar="A", help="backward passes per optimizer step (M)")
    parser.add_argument(
        "--extra-in-flight", metavar="S", help="see --paci-extra-in-flight (0)"
    )
    parser.add_argument(
        "--megatron-args", metavar='"FLAGS"', default="",
        help="more of Megatron's flags, which win over those chosen here; a single one as "
        "--megatron-args=--bf16",
    )


def read(options: argparse.Namespace, reader: Reader) -> MemoryRun:
    """Return the parameters; every mistake goes to ``reader.problems``."""
    stages = reader.whole("stages", options.stages, DEFAULT.stages)
    microbatches = reader.whole("microbatches", options.microbatches, DEFAULT.microbatches)
    extra = reader.whole("extra-in-flight", options.extra_in_flight, 0, least=0)
    run = MemoryRun(
        stages=stages, microbatches=microbatches,
        accum=reader.whole("accum", options.accum, microbatches), extra_in_flight=extra,
        megatron_args=options.megatron_args,
    )
    if (least := -(-run.in_flight("paci")[0] // COUNTED_ITERATIONS)) > microbatches:
        reader.refuse(
            "microbatches", microbatches,
            f"the pipeline does not fill in the {COUNTED_ITERATIONS} iterations in which "
            f"activations are counted; give {least} or more",
        )
    reader.problems += run.run("paci", Path()).problems()
    return run


def measure(run: MemoryRun, seconds: float) -> dict[str, Any]:
    """Measure; see ``memory.measure``."""
    return memory.measure(run, seconds=seconds)


def table(result: dict[str, Any]) -> str:
    """Return the bytes of every stage and both ratios as text."""
    names = (*WEIGHTS, "activations_peak", "messages_peak", "message")
    head = ("stage", "schedule", *(name.replace("_", " ") for name in names))
    rows = [head]
    for stage in range(len(result["weights_ratio"])):
        for schedule in SCHEDULES:
            figures = result["stages"][schedule][stage]
            rows.append((str(stage), schedule, *(str(figures[name]) for name in names)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    for name in ("weights", "activations"):
        ratios = ", ".join(f"{ratio:.3f}" for ratio in result[f"{name}_ratio"])
        lines.append(f"{name}, PACI / 1F1B per stage: {ratios}")
    limits = ", ".join(f"{limit:.3f}" for limit in result["activations_limit"])
    lines.append(f"microbatches in flight, PACI / 1F1B per stage: {limits}")
    return "\n".join(lines) + "\n"
