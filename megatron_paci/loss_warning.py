"""Warns during training when the loss rises or is stuck (loss_watch.py)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from megatron_paci.late_values import LateValues
from megatron_paci.loss_watch import LossWatch, warning
from megatron_paci.schedule import StageSchedule

logger = logging.getLogger(__name__)


class LossWarning:
    """Watches the first of the losses that a training step returns; never waits for the device."""

    def __init__(self):
        self._late_values = LateValues()
        self._watch = LossWatch()

    def iteration(
        self, number: int, losses: Mapping[str, torch.Tensor], schedule: StageSchedule
    ) -> None:
        """Take the losses of an iteration, numbered from 1, and the schedule of any stage."""
        arrived = self._late_values.put(number, next(iter(losses.values())).detach())
        for iteration, loss in arrived:
            if (finding := self._watch.add(iteration, loss)) is not None:
                first = replace(schedule, stage=0)  # the stage with the latest gradients
                logger.warning("%s", warning(
                    finding, accumulation=first.accumulation, drift_bound=first.drift_bound
                ))
