"""The window of a stage whose pipeline lives in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron_paci.optimizers import take_back_steps
from megatron_paci.report import Report
from megatron_paci.window import MegatronWindow


class LocalWindow(MegatronWindow):
    """Can also step together with the other stages, as under 1F1B.

    Attributes:
        joint: Whether a step waits until all stages have completed the window, and clips with the
            norm over all of them as Megatron's 1F1B does. That changes no stage's order: the
            gradients of a window depend on no step of that window, on any stage.
        waiting: Whether a step waits so.
        sum_of_squares: Of this stage's gradients in the window closed last.
    """

    joint = False
    waiting = False
    sum_of_squares = 0.0

    def close(self, window: int, later: Report | None) -> Report:
        """Complete the gradients of the window; note their sum of squares."""
        report = super().close(window, later)
        self.sum_of_squares = self.ledger.outstanding()[-1].sum_of_squares
        return report

    def step(self) -> None:
        """Update now, or leave it to ``step_jointly``."""
        if self.joint:
            self.waiting = True
        else:
            super().step()

    def step_jointly(self, grad_norm: float) -> None:
        """Make the update that waits, clipped with ``grad_norm``; leave it out if that is not
        finite."""
        self.waiting = False
        self.ledger.grad_norm = grad_norm
        if not math.isfinite(grad_norm) and not self._skip:
            self._skip = True
            self.skipped += 1
        super().step()

    def settle(self) -> None:
        """Left to ``settle_jointly``, when all stages have drained."""

    def settle_jointly(self, outstanding: Sequence[Sequence[Report]]) -> None:
        """Do what ``MegatronWindow.settle`` does.

        Args:
            outstanding: ``ledger.outstanding()`` of all stages.
        """
        if self._tied is not None:
            self.gather_weights()
            self._tied.settle()
        for partial in self.ledger.settle(outstanding):
            self._note_partial(partial)
        if self._steps_ahead:
            take_back_steps(self._optimizer, self._steps_ahead)
            self._steps_ahead = 0


def norm_over_stages(windows: Sequence[LocalWindow]) -> float:
    """Return the norm of all stages' gradients in the window closed last, rounded as Megatron's."""
    squares = torch.tensor([window.sum_of_squares for window in windows], dtype=torch.float32)
    total = squares[0]
    for each in squares[1:]:
        total = total + each
    return math.sqrt(total.item())
