"""Which accumulation holds from which sample on: ``--paci-accum`` and ``--paci-accum-schedule``.

Pure. What the flags say is looked up with the samples consumed when an iteration begins, as
Megatron looks up the batch size, so every rank knows it and a resumed run goes on where it was.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

SYNC = 0
"""The accumulation of a synchronous phase: Megatron's own 1F1B."""

_PHASE = re.compile(r"(sync|[1-9][0-9]*)(?::([0-9]+))?")


@functools.cache  # every iteration asks
def parse_phases(text: str) -> Mapping[int, int]:
    """Return the accumulations of e.g. ``sync:0,4:20000`` by the sample from which on they hold.

    ``4`` alone holds from sample 0 on; ``SYNC`` stands for 1F1B.

    Raises:
        ValueError: The message says what is wrong with which part.
    """
    phases: dict[int, int] = {}
    for part in text.split(","):
        found = _PHASE.fullmatch(part.strip())
        if found is None:
            raise ValueError(
                f"{part.strip()!r} is not an accumulation of at least 1, or sync, with the sample "
                "from which on it holds"
            )
        first = int(found[2] or 0)
        if not phases and first != 0:
            raise ValueError("nothing holds from sample 0 on")
        if first <= max(phases, default=-1):
            raise ValueError(f"{part.strip()!r} does not begin after the part before it")
        phases[first] = SYNC if found[1] == "sync" else int(found[1])
    return MappingProxyType(phases)


def value_at(values: Mapping[int, Any], sample: int) -> Any:
    """Return what holds at ``sample`` of values that hold from samples on, one of them from 0."""
    return values[max(first for first in values if first <= sample)]


def accumulation_at(args: argparse.Namespace, sample: int, num_microbatches: int) -> int:
    """Return the accumulation of an iteration by the flags, ``SYNC`` for 1F1B.

    Args:
        args: Megatron's arguments.
        sample: Samples consumed before the iteration.
        num_microbatches: Of the iteration; one window has as many without any flag.
    """
    if args.paci_accum_schedule is not None:
        return value_at(parse_phases(args.paci_accum_schedule), sample)
    return args.paci_accum or num_microbatches
