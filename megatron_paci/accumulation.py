"""Which accumulation holds from which sample on: ``--paci-accum`` and ``--paci-accum-schedule``.

Pure. What the flags say is looked up with the samples consumed when an iteration begins, as
Megatron looks up the batch size, so every rank knows it and a resumed run goes on where it was.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

SYNC = 0
"""The accumulation of a synchronous phase: Megatron's own 1F1B."""

_PHASE = re.compile(r"(sync|[1-9][0-9]*)(?::([0-9]+))?")


class Phase(NamedTuple):
    """What holds from a sample on."""

    accumulation: int
    """Backward passes per optimizer step; ``SYNC`` for 1F1B."""
    first_sample: int


@functools.cache  # every iteration asks
def parse_phases(text: str) -> tuple[Phase, ...]:
    """Return the phases of e.g. ``sync:0,4:20000``; ``4`` alone holds from the first sample on.

    Raises:
        ValueError: The message says what is wrong with which part.
    """
    phases: list[Phase] = []
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
        if phases and first <= phases[-1].first_sample:
            raise ValueError(f"{part.strip()!r} does not begin after the part before it")
        phases.append(Phase(SYNC if found[1] == "sync" else int(found[1]), first))
    return tuple(phases)


def phase_at(phases: Sequence[Phase], sample: int) -> Phase:
    """Return the phase of an iteration that begins when ``sample`` samples are consumed."""
    return [phase for phase in phases if phase.first_sample <= sample][-1]


def accumulation_at(args: argparse.Namespace, sample: int, num_microbatches: int) -> int:
    """Return the accumulation of an iteration by the flags, ``SYNC`` for 1F1B.

    Args:
        args: Megatron's arguments.
        sample: Samples consumed before the iteration.
        num_microbatches: Of the iteration; one window has as many without any flag.
    """
    if args.paci_accum_schedule is not None:
        return phase_at(parse_phases(args.paci_accum_schedule), sample).accumulation
    return args.paci_accum or num_microbatches
