"""``python -m megatron_paci bench host``: its flags and its table."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_paci.bench import host
from megatron_paci.bench.host import HostRun
from megatron_paci.simulate.reading import Reader

HELP = "Python time of the schedules' own loops per microbatch"
DESCRIPTION = (
    "Run the loops of Megatron's 1F1B and of PACI in turns in this process, around passes, "
    "messages and updates that take no time, on the first, a middle and the last stage: what is "
    "left is what a schedule costs the host. Medians over the repetitions; the ratio is that of "
    "the stage where PACI does worst. The machine should have nothing else to do."
)
SECONDS = 600.0
DEFAULT = HostRun()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the benchmark."""
    for name, metavar, text in (
        ("stages", "N", "pipeline stages"),
        ("microbatches", "M", "microbatches per iteration"),
        ("repetitions", "K", "iterations of each schedule to measure"),
        ("profile", "LINES", "also profile both loops on a middle stage, show so many functions"),
    ):
        default = getattr(DEFAULT, name)
        parser.add_argument(f"--{name}", metavar=metavar, help=f"{text} ({default})")
    parser.add_argument("--accum", metavar="A", help="backward passes per optimizer step (M)")


def read(options: argparse.Namespace, reader: Reader) -> HostRun:
    """Return the parameters; every mistake goes to ``reader.problems``."""
    microbatches = reader.whole("microbatches", options.microbatches, DEFAULT.microbatches)
    accum = reader.whole("accum", options.accum, microbatches)
    if microbatches % accum:
        reader.refuse(
            "accum", accum, f"does not divide --microbatches {microbatches}; give e.g. "
            f"--accum {microbatches}"
        )
    return HostRun(
        stages=reader.whole("stages", options.stages, DEFAULT.stages, least=2),
        microbatches=microbatches,
        accum=accum,
        repetitions=reader.whole("repetitions", options.repetitions, DEFAULT.repetitions),
        profile=reader.whole("profile", options.profile, DEFAULT.profile, least=0),
    )


def measure(run: HostRun, seconds: float) -> dict[str, Any]:
    """Measure; see ``host.measure``. It takes seconds, so the limit is of no use."""
    return host.measure(run)


def table(result: dict[str, Any]) -> str:
    """Return the times of every stage as text."""
    lines = [
        "us per microbatch      without posting messages       with posting",
        "stage                1F1B     PACI    ratio      1F1B     PACI    ratio   telemetry adds",
    ]
    for stage in result["stages"]:
        cells = "   ".join(
            f"{each['1f1b_us']:7.2f}  {each['paci_us']:7.2f}  {each['ratio']:7.3f}"
            for each in (stage, stage["with_posting"])
        )
        lines.append(f"{stage['stage']:5d}             {cells}   {stage['telemetry_us']:14.2f}")
    lines.append(
        f"largest ratio: {result['ratio']:.3f}, with posting "
        f"{result['ratio_with_posting']:.3f}"
    )
    for name, text in result.get("profile", {}).items():
        lines.append(f"\n{name}:\n{text}")
    return "\n".join(lines) + "\n"
