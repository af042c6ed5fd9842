"""The window: ``accumulation`` backward passes, then one optimizer step of this stage alone.

A stage updates like a Megatron job with one pipeline stage: the same gradient finalization, the
same optimizer, the same clipping, on groups that do not leave the stage.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection


class MegatronWindow:
    """Updates the weights of one model chunk; implements ``engine.Window``.

    Attributes:
        grad_norm: Norm of this stage's gradient in the last window, before clipping; None before
            the first and where Megatron does not compute it (``--clip-grad 0``).
        num_zeros: Zeros in that gradient, None unless Megatron counts them.
        skipped: Windows whose step the optimizer refused.
        samples_per_microbatch: Samples that one microbatch takes from the data set, over all
            replicas; the unit of Megatron's learning-rate schedule.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        scheduler: Any,
        config: Any,
        pg_collection: ProcessGroupCollection,
        *,
        accumulation: int,
    ):
        """Keep references; nothing is changed yet.

        Args:
            scheduler: Megatron's ``OptimizerParamScheduler`` or None.
            pg_collection: Groups of this rank that hold no rank of another stage.
            accumulation: Microbatches per window.
        """
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._config = config
        self._pg_collection = pg_collection
        self._parameters = tuple(model.parameters())
        self._no_sync: AbstractContextManager | None = None
        self._open = False
        self.accumulation = accumulation
        self.samples_per_microbatch = 1
        self.grad_norm: float | None = None
        self.num_zeros: int | None = None
        self.skipped = 0

    def prepare(self, last: bool) -> None:
        """Ready the gradient buffers for a backward; only the window's last one starts reductions."""
        if not self._open:
            self._zero_gradients()
        if last:
            self._allow_reduction()
        elif self._no_sync is None and self._config.no_sync_func is not None:
            self._no_sync = self._config.no_sync_func()
            self._no_sync.__enter__()

    def step(self) -> None:
        """Finalize the window's gradients, update the weights, advance the schedules."""
        self._config.finalize_model_grads_func(
            [self._model], None, pg_collection=self._pg_collection
        )
        # Microbatches in flight have saved these parameters for their backward, which is to use
        # them as they are then (eq. 1); autograd would take the update for an accident.
        with torch.autograd._unsafe_preserve_version_counter(self._parameters):
            success, self.grad_norm, self.num_zeros = self._optimizer.step()
        self.skipped += not success
        # By samples consumed, not by steps that succeeded: else stages would part.
        if self._scheduler is not None:
            self._scheduler.step(increment=self.accumulation * self.samples_per_microbatch)
        self._open = False

    def _zero_gradients(self) -> None:
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._open = True

    def _allow_reduction(self) -> None:
        if self._no_sync is not None:
            self._no_sync.__exit__(None, None, None)
            self._no_sync = None


def stage_local_collection(
    collection: ProcessGroupCollection, alone: torch.distributed.ProcessGroup
) -> ProcessGroupCollection:
    """Return a copy of ``collection`` whose pipeline-spanning groups hold this rank alone."""
    local = copy.copy(collection)
    local.pp = local.embd = local.pos_embd = alone
    return local


class StageLocalStatistics:
    """Makes the optimizer's norm, clipping and overflow checks stay within the stage; undoable."""

    def __init__(self, optimizer: Any, group: torch.distributed.ProcessGroup):
        self._optimizers = getattr(optimizer, "chained_optimizers", None) or [optimizer]
        self._originals = [
            optimizer.get_grad_stats_parallel_group() for optimizer in self._optimizers
        ]
        for optimizer in self._optimizers:
            optimizer.grad_stats_parallel_group = group

    def undo(self) -> None:
        """Give the optimizers their groups back."""
        for optimizer, original in zip(self._optimizers, self._originals):
            optimizer.grad_stats_parallel_group = original
