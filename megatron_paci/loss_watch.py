"""Notices a loss that rises, or that stops falling early, as delayed gradients make it do. Pure.

Constants are set so that no run that learned well in the experiments of docs/convergence.md (What
the runtime warning would have said) comes near them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, stdev

from megatron_paci.delay import COMPARE, REMEDY

WINDOW = 50
"""Iterations over which losses are averaged."""
RISE = 0.05
"""How far the mean may rise above its lowest value so far, as a share of that, or of 1 nat if that
is more."""
ERRORS = 10
"""And in standard errors of the lowest mean, so that the noise of small batches is none: of two
million independent means about one is more than 5 of them off."""
FALL = 0.08
"""By what share the mean has to fall while the number of iterations doubles, early in training."""
CHECKS = (150, 300, 600)
"""At which iterations that is looked at. Later on healthy losses may be as flat."""
FIRST_FALL = 0.2
"""Only if it has fallen so far since the first iteration: what begins with trained weights, or
cannot be learned, does not."""


@dataclass(frozen=True)
class Finding:
    """A mean loss that is too high, next to an earlier one."""

    what: str
    """``risen`` or ``stuck``."""
    first: int
    """First iteration of the mean."""
    last: int
    mean: float
    before: float
    """The lowest mean so far, or that of half as many iterations."""
    before_at: int
    """Last iteration of that one."""


class LossWatch:
    """Tells once per episode that the running mean of the loss has risen; once that it is stuck.

    An episode begins when it is too far above its lowest value, and ends when it has come half of
    the way back. Means are those of whole windows. Losses that are not finite are left out: so are
    their updates, and the log says so.

    Attributes:
        largest: The largest rise so far, noise or not, as a share of the lowest mean.
        least_fall: By what share the mean has fallen since half of the iterations, at that one of
            ``CHECKS`` where it is least.
    """

    def __init__(self, window: int = WINDOW):
        self._losses: deque[tuple[int, float]] = deque(maxlen=window)
        self._lowest, self._lowest_at, self._allowed = math.inf, 0, math.inf
        self._in_episode = self._is_stuck = False
        self._start: float | None = None
        self._half: float | None = None
        self.largest = 0.0
        self.least_fall = math.inf

    def add(self, iteration: int, loss: float) -> Finding | None:
        """Take the loss of an iteration, from 1; return what there is to tell."""
        if not math.isfinite(loss):
            return None
        if iteration == 1:
            self._start = loss
        self._losses.append((iteration, loss))
        if len(self._losses) < self._losses.maxlen:
            return None
        mean = fmean(value for _, value in self._losses)
        return self._find_rise(iteration, mean) or self._find_stuck(iteration, mean)

    def _find_rise(self, iteration: int, mean: float) -> Finding | None:
        if mean < self._lowest:
            error = stdev(value for _, value in self._losses) / math.sqrt(len(self._losses))
            self._lowest, self._lowest_at = mean, iteration
            self._allowed = max(RISE * max(mean, 1.0), ERRORS * error)
        rise = mean - self._lowest
        self.largest = max(self.largest, rise / self._lowest)
        if self._in_episode:
            self._in_episode = rise > self._allowed / 2
        elif rise > self._allowed:
            self._in_episode = True
            return self._finding("risen", mean, self._lowest, self._lowest_at)
        return None

    def _find_stuck(self, iteration: int, mean: float) -> Finding | None:
        """Compare with the mean at half of the iterations, which is that of the check before."""
        before = self._half
        if iteration == CHECKS[0] // 2 or iteration in CHECKS:
            self._half = mean
        if self._start is None or before is None or iteration not in CHECKS:
            return None
        fall = 1 - mean / before
        self.least_fall = min(self.least_fall, fall)
        has_begun = 1.0 < mean < (1 - FIRST_FALL) * self._start
        if self._is_stuck or not has_begun or fall >= FALL:
            return None
        self._is_stuck = True
        return self._finding("stuck", mean, before, iteration // 2)

    def _finding(self, what: str, mean: float, before: float, before_at: int) -> Finding:
        return Finding(what, self._losses[0][0], self._losses[-1][0], mean, before, before_at)


def warning(finding: Finding, *, accumulation: int, drift_bound: int) -> str:
    """Return what to say.

    Args:
        accumulation: Backward passes per optimizer step.
        drift_bound: Most optimizer steps by which a gradient can be late.
    """
    what = {"risen": "has risen", "stuck": "hardly falls"}[finding.what]
    return (
        f"the loss {what}: its mean over iterations {finding.first} to {finding.last} is "
        f"{finding.mean:.4f}, and was {finding.before:.4f} at iteration {finding.before_at}. "
        f"Gradients are up to {drift_bound} optimizer steps late (--paci-accum {accumulation}). If "
        f"that is why, and not the data: {REMEDY}. Whether it is: {COMPARE}"
    )
