"""Virtual time of a run: how long a pipeline of GPUs would take, by a stated cost model.

A forward pass of a microbatch of ``b`` sequences takes ``t(b) = b + o`` on every stage, a backward
pass twice that; ``o`` is what a pass costs besides its sequences, in sequences. Messages and
optimizer steps cost nothing. A drain costs PACI ``N - 1`` passes: until it fills again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from megatron_paci.accumulation import SYNC
from megatron_paci.convergence.settings import Settings

PASSES = 3  # a forward, and a backward that takes as long as two
OVERHEADS = (Fraction(0), Fraction(1, 50), Fraction(1, 25))
"""Of a pass, as parts of the batch. The middle one fits the paper's times of 1F1B at batch 128:
227.6, 162.3 and 148.6 hours with m = 4, 8 and 16, at N = 8."""


def times(settings: Settings, overhead: Fraction) -> list[Fraction]:
    """Return the time at the end of each iteration; one sequence's forward on a stage takes 1.

    Args:
        overhead: ``o``, as a part of the batch.
    """
    microbatch = PASSES * (settings.microbatch + overhead * settings.batch)
    bubble = settings.stages - 1
    interval = settings.iterations // settings.validations
    now, found, before = Fraction(0), [], None
    for iteration in range(settings.iterations):
        accumulation = settings.accumulation_at(iteration)
        fills = accumulation == SYNC or accumulation != before or iteration % interval == 0
        now += microbatch * (settings.num_microbatches + (bubble if fills else 0))
        before = accumulation
        found.append(now)
    return found


def best_flush(settings: Settings, overhead: Fraction) -> Settings:
    """Return the 1F1B run with the size of microbatches that takes the least time."""
    sizes = [size for size in range(1, settings.batch + 1) if settings.batch % size == 0]
    return min(
        (replace(settings, schedule="sync", microbatch=size) for size in sizes),
        key=lambda each: times(each, overhead)[-1],
    )


def first_below(
    validation: Sequence[Sequence[float]], target: float, clock: Sequence[Fraction]
) -> float | None:
    """Return when a validation loss is reached, on a straight line between two measurements.

    Args:
        validation: Pairs of iteration, from 1 on, and loss.
        clock: ``times`` of the run.

    Returns:
        None if it is never reached, or was before the first measurement.
    """
    for (before, high), (after, low) in zip(validation, validation[1:]):
        if low <= target < high:
            part = (high - target) / (high - low)
            start, end = float(clock[int(before) - 1]), float(clock[int(after) - 1])
            return start + part * (end - start)
    return None
