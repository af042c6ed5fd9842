"""Flags that the benchmarks in real time share, and how they are read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_paci.bench.theory import SCHEDULES
from megatron_paci.simulate.reading import Reader


def add_wall_arguments(
    parser: argparse.ArgumentParser, *, iterations: int, repetitions: int
) -> None:
    """Add the flags of ``WallOptions``, with these defaults."""
    parser.add_argument(
        "--schedules", metavar="NAME[,NAME...]", default=",".join(SCHEDULES),
        help="pipeline schedules (default: %(default)s)",
    )
    parser.add_argument(
        "--accum", metavar="A",
        help="paci: backward passes per optimizer step (default: all microbatches of an iteration)",
    )
    parser.add_argument(
        "--chunks", metavar="V", help="interleaved: model chunks per stage (default: 2)"
    )
    parser.add_argument(
        "--extra-in-flight", metavar="S", default="0",
        help="paci: value of --paci-extra-in-flight (default: %(default)s)",
    )
    parser.add_argument(
        "--iterations", metavar="K", default=str(iterations),
        help="measured iterations of each training (default: %(default)s)",
    )
    parser.add_argument(
        "--warmup", metavar="K",
        help="iterations before them (default: 3, more if the pipeline is longer)",
    )
    parser.add_argument(
        "--repetitions", metavar="R", default=str(repetitions),
        help="how often each schedule is trained, in turn; medians are shown "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--megatron-args", metavar='"FLAGS"', default="",
        help="more of Megatron's flags, which win over those chosen here; a single one as "
        "--megatron-args=--bf16",
    )


@dataclass(frozen=True, kw_only=True)
class WallOptions:
    """What the flags say."""

    schedules: Sequence[str]
    accum: int | None
    chunks: int
    extra_in_flight: Sequence[int]
    """One number, unless the benchmark takes several."""
    iterations: int
    warmup: int | None
    repetitions: int
    megatron_args: str

    def of(self, schedule: str) -> dict[str, Any]:
        """Return the fields of a ``TrainingRun`` under ``schedule``."""
        return {
            "schedule": schedule,
            "accum": self.accum if schedule == "paci" else None,
            "chunks": self.chunks,
            "extra_in_flight": self.extra_in_flight[0] if schedule == "paci" else 0,
            "iterations": self.iterations,
            "warmup": self.warmup,
            "megatron_args": self.megatron_args,
        }


def read_wall_options(
    options: argparse.Namespace, reader: Reader, *, several_extra: bool = False
) -> WallOptions:
    """Read the flags; mistakes go to ``reader``.

    Args:
        several_extra: Whether ``--extra-in-flight`` may be several numbers.
    """
    schedules = list(dict.fromkeys(options.schedules.split(",")))
    if unknown := [name for name in schedules if name not in SCHEDULES]:
        reader.refuse(
            "schedules", options.schedules,
            f"{unknown[0]!r} is unknown; take of {', '.join(SCHEDULES)}",
        )
        schedules = []
    accum = None if options.accum is None else reader.whole("accum", options.accum, 1)
    if accum is not None and schedules and "paci" not in schedules:
        reader.refuse("accum", options.accum, "has no meaning without paci; drop it, or add paci")
    texts = options.extra_in_flight.split(",") if several_extra else [options.extra_in_flight]
    return WallOptions(
        schedules=schedules,
        accum=accum,
        chunks=reader.whole("chunks", options.chunks, 2, least=2),
        extra_in_flight=[reader.whole("extra-in-flight", text, 0, least=0) for text in texts],
        iterations=reader.whole("iterations", options.iterations, 1),
        warmup=None if options.warmup is None
        else reader.whole("warmup", options.warmup, 3, least=0),
        repetitions=reader.whole("repetitions", options.repetitions, 1),
        megatron_args=options.megatron_args,
    )
