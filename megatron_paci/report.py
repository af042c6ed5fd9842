"""Reports: the few numbers that stages must tell each other, and what a stage makes of them.

One report per window travels upstream right behind the window's last gradient and holds what the
later stages know of that window; one travels downstream with a fixed forward (see
``StageSchedule.reported_window``) and holds what the earlier stages know of an older one. Both are
aggregated on the way, arrive without any extra wait and with a lag that the order alone decides, so
runs stay bitwise repeatable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

EXIT_ON_SIGNAL = 1
EXIT_ON_DURATION = 2


@dataclass(frozen=True)
class Report:
    """Numbers about one window, over some consecutive stages. Travels as a float64 vector."""

    window: int
    """Optimizer steps the stage had taken before it: the same number on all stages."""

    sum_of_squares: float
    """Of the gradients, not finite if a gradient was not."""

    num_zeros: float = 0.0
    """Zeros in the gradients, where Megatron counts them."""

    skipped: int = 0
    """Stages that skip the window because a gradient is not finite."""

    num_tokens: float = 0.0
    """Tokens of the window that enter the loss; only upstream."""

    loss_scale: float = 1.0
    """Scale of the window's loss, fixed by the last stage; only upstream."""

    requests: int = 0
    """Bits ``EXIT_ON_*``: wished for (upstream), or decided for this iteration (downstream)."""

    def vector(self) -> tuple[float, ...]:
        """Return the fields as numbers."""
        return (
            float(self.window), self.sum_of_squares, self.num_zeros, float(self.skipped),
            self.num_tokens, self.loss_scale, float(self.requests),
        )

    @classmethod
    def from_vector(cls, values: Sequence[float]) -> Report:
        """Inverse of ``vector``."""
        window, sum_of_squares, num_zeros, skipped, num_tokens, loss_scale, requests = values
        return cls(
            int(window), sum_of_squares, num_zeros, int(skipped), num_tokens, loss_scale,
            int(requests),
        )


REPORT_LENGTH = len(fields(Report))


@dataclass(frozen=True)
class WindowTotals:
    """What is known of a window over the whole pipeline."""

    window: int
    grad_norm: float
    num_zeros: float
    skipped: int


class Ledger:
    """What one stage knows about the gradients of recent windows.

    Attributes:
        newest: Totals of the newest window that is known over the whole pipeline, or None.
        grad_norm: Norm to clip the window that was closed last with.
        earlier: Sum of squares over the earlier stages in the newest window heard of, or None.
    """

    def __init__(self, *, clip: str, is_first: bool):
        """Start without any knowledge.

        Args:
            clip: ``pipelined`` clips with the norm over all stages, as far as it is known: own and
                later stages exactly, earlier stages from the newest window heard of (nothing
                before the first one). ``local`` clips each stage with its own norm.
        """
        self._clip = clip
        self._is_first = is_first
        self._closed: dict[int, tuple[Report, Report]] = {}
        self.newest: WindowTotals | None = None
        self.grad_norm = 0.0
        self.earlier: float | None = None

    def close(self, own: Report, later: Report | None, own_norm: float) -> Report:
        """Take the figures of a window that has ended; return those to send upstream.

        Args:
            own: Of this stage alone.
            later: Over all later stages, None on the last one.
            own_norm: Square root of ``own.sum_of_squares`` as Megatron rounds it: with no other
                stage involved it is the norm, so that one stage clips as Megatron does.
        """
        here_and_later = own if later is None else _add(own, later)
        self._closed[own.window] = own, here_and_later
        if self._clip == "local" or (later is None and self.earlier is None):
            self.grad_norm = own_norm
        else:
            self.grad_norm = math.sqrt(here_and_later.sum_of_squares + (self.earlier or 0.0))
        if self._is_first:
            norm = own_norm if later is None else math.sqrt(here_and_later.sum_of_squares)
            self._note_totals(here_and_later, norm)
        return here_and_later

    def hear(self, earlier: Report) -> bool:
        """Take the figures of the earlier stages for a window this stage has closed before.

        Returns:
            Whether the window was a partial update: an earlier stage has skipped it, this one not.
        """
        own, here_and_later = self._closed[earlier.window]
        if math.isfinite(earlier.sum_of_squares):
            self.earlier = earlier.sum_of_squares
        total = _add(here_and_later, earlier)
        self._note_totals(total, math.sqrt(total.sum_of_squares))
        self._closed[earlier.window] = _add(own, earlier), here_and_later
        return earlier.skipped > 0 and not own.skipped

    def tell(self, window: int) -> Report:
        """Return the figures of this and all earlier stages for ``window``, to send downstream."""
        up_to_here, _ = self._closed.pop(window)
        return up_to_here

    def outstanding(self) -> list[Report]:
        """Return this stage's own figures of the windows that no report has come down for."""
        return [own for own, _ in self._closed.values()]

    def settle(self, outstanding: Sequence[Sequence[Report]]) -> list[Report]:
        """At a drain take the figures of all stages, and forget the ones kept for clipping.

        A run that is resumed from a checkpoint taken there could not have those.

        Args:
            outstanding: What ``outstanding`` returned, for each stage; the windows are the same.

        Returns:
            The totals of windows that were partial updates: skipped elsewhere, not here.
        """
        partial = []
        for (own, _), stages in zip(self._closed.values(), zip(*outstanding, strict=True)):
            total = stages[0]
            for other in stages[1:]:
                total = _add(total, other)
            self._note_totals(total, math.sqrt(total.sum_of_squares))
            if total.skipped and not own.skipped:
                partial.append(total)
        self._closed.clear()
        self.earlier = None
        return partial

    def _note_totals(self, report: Report, grad_norm: float) -> None:
        self.newest = WindowTotals(report.window, grad_norm, report.num_zeros, report.skipped)


def _add(report: Report, other: Report) -> Report:
    """Return ``report`` with the sums of ``other`` added; the rest is that of ``other``."""
    assert report.window == other.window, f"window {report.window} meets {other.window}"
    return Report(
        window=report.window,
        sum_of_squares=report.sum_of_squares + other.sum_of_squares,
        num_zeros=report.num_zeros + other.num_zeros,
        skipped=report.skipped + other.skipped,
        num_tokens=other.num_tokens,
        loss_scale=other.loss_scale,
        requests=report.requests | other.requests,
    )
