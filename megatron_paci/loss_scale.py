"""The fp16 loss scale, which Megatron adapts on all stages at once and PACI on each alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron_paci.report import Report


class LossScale:
    """The gradient scalers of a stage; without fp16 there are none and nothing happens.

    The loss of a window is scaled on the last stage. Its gradients come to earlier stages when that
    stage may have adapted its scale to other windows, so reports carry the scale.
    """

    def __init__(self, parts: Iterable[Any]):
        """Take the scalers of the optimizers ``parts``."""
        self._scalers = [
            part.grad_scaler for part in parts if getattr(part, "grad_scaler", None)
        ]
        self._overflows = 0

    def fix(self, later: Report | None) -> float:
        """Make the unscaling use the scale of the window's loss; return it.

        Args:
            later: The later stages' report of the window, None on the last stage.
        """
        scale = 1.0 if later is None else later.loss_scale
        for scaler in self._scalers:
            if later is None:
                scale = scaler.scale.item()
            else:
                scaler.scale.fill_(scale)
        return scale

    def hear_overflow(self) -> None:
        """Note an overflow in an earlier stage, for ``lower``."""
        self._overflows += 1

    def lower(self) -> None:
        """Let the scalers know of overflows heard of, between windows: each has one scale."""
        for _ in range(self._overflows):
            for scaler in self._scalers:
                scaler.update(True)
        self._overflows = 0

    def settle(self, pipeline: torch.distributed.ProcessGroup) -> None:
        """Give all stages the last one's scale, whichever of them a checkpoint stores."""
        self.lower()
        if not self._scalers:
            return
        states: list[Any] = [None] * pipeline.size()
        own = [scaler.state_dict() for scaler in self._scalers]
        torch.distributed.all_gather_object(states, own, group=pipeline)
        for scaler, state in zip(self._scalers, states[-1]):
            scaler.load_state_dict(state)
