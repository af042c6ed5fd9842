"""How far two loss curves are apart, and how sure that is. Pure.

Both runs saw the same samples in the same order, so what a sample does to the loss cancels out of
the difference of the two losses of an iteration. What is left is still alike in neighbouring
iterations, whose weights are nearly the same. Hence a straight line through the means of blocks of
iterations: its height in the middle is the mean difference, its slope tells whether the gap grows,
and the spread of the blocks around it how sure both are (docs/compare.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_paci.student import interval, percentile

BLOCKS = 10
LEAST_ITERATIONS = 4 * BLOCKS
"""Of a run; half of them count, two per block."""
MOST_CORRELATION = 0.9


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The loss of one run less that of another, in nats; errors are half of a 95% interval."""

    level: float
    """Mean over the iterations that count."""
    level_error: float
    trend: float
    """Change of the difference in 100 iterations."""
    trend_error: float
    counted: tuple[int, int]
    """First and last of the iterations that count, from 1."""
    quarters: list[float]
    """Mean difference in each quarter of the run."""
    block: int | None = None
    """Iterations in each of the ``BLOCKS`` blocks; None if errors are those over seeds."""
    correlation: float | None = None
    """Of neighbouring blocks, 0 if it is below."""
    seeds: int = 1

    @property
    def parts(self) -> bool:
        """Whether the mean difference is clear of 0."""
        return abs(self.level) > self.level_error

    @property
    def moves(self) -> bool:
        """Whether its change is clear of 0."""
        return abs(self.trend) > self.trend_error


def gap(losses: Sequence[float], others: Sequence[float]) -> Gap:
    """Return how far the losses of two runs are apart in the last half of the shorter one.

    Args:
        losses: One finite number per iteration.
        others: Those of the run that is subtracted.

    Raises:
        ValueError: There are fewer than ``LEAST_ITERATIONS``.
    """
    differences = [one - other for one, other in zip(losses, others)]
    count = len(differences)
    if count < LEAST_ITERATIONS:
        raise ValueError(f"{count} iterations: at least {LEAST_ITERATIONS} are needed")
    block = count // 2 // BLOCKS
    half = differences[count - BLOCKS * block:]
    means = [fmean(half[i:i + block]) for i in range(0, len(half), block)]
    places = [number - (BLOCKS - 1) / 2 for number in range(BLOCKS)]
    squares = sum(place * place for place in places)
    level = fmean(means)
    slope = sum(place * mean for place, mean in zip(places, means)) / squares
    rest = [mean - level - slope * place for place, mean in zip(places, means)]
    correlation = _correlation(rest)
    # Neighbours that are alike say less than as many independent ones.
    deviation = math.sqrt(
        sum(each * each for each in rest) / (BLOCKS - 2) * (1 + correlation) / (1 - correlation)
    )
    wide = percentile(BLOCKS - 2) * deviation
    per_hundred = 100 / block
    return Gap(
        level=level,
        level_error=wide / math.sqrt(BLOCKS),
        trend=slope * per_hundred,
        trend_error=wide / math.sqrt(squares) * per_hundred,
        counted=(count - len(half) + 1, count),
        quarters=_quarters(differences),
        block=block,
        correlation=correlation,
    )


def gap_over_seeds(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Gap:
    """Return how far the losses are apart on average; errors are those over at least two seeds.

    Args:
        pairs: Per seed the losses of a run and those of the run that is subtracted.

    Raises:
        ValueError: A run is too short.
    """
    gaps = [gap(*pair) for pair in pairs]
    level, level_error = interval([each.level for each in gaps])
    trend, trend_error = interval([each.trend for each in gaps])
    return Gap(
        level=level, level_error=level_error, trend=trend, trend_error=trend_error,
        counted=gaps[0].counted, seeds=len(gaps),
        quarters=[fmean(each) for each in zip(*(found.quarters for found in gaps))],
    )


def _correlation(rest: Sequence[float]) -> float:
    """Return the correlation of neighbouring blocks, from their distances to the line.

    Ten blocks less a line that is fitted to them show too little of it: of a correlation r about
    r - (2 + 6 r) / 10. That is put back here, to first order.
    """
    squares = sum(each * each for each in rest)
    if not squares:
        return 0.0
    shown = sum(one * other for one, other in zip(rest, rest[1:])) / squares
    return min(MOST_CORRELATION, max(0.0, shown + (2 + 6 * shown) / BLOCKS))


def _quarters(values: Sequence[float]) -> list[float]:
    ends = [len(values) * number // 4 for number in range(5)]
    return [fmean(values[first:last]) for first, last in zip(ends, ends[1:])]
