"""Keeps what Megatron reduces over the whole model within one stage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_paci.optimizers import optimizer_parts


def stage_local_collection(
    collection: ProcessGroupCollection, alone: torch.distributed.ProcessGroup
) -> ProcessGroupCollection:
    """Return a copy of ``collection`` whose pipeline-spanning groups hold this rank alone."""
    local = copy.copy(collection)
    local.pp = local.embd = local.pos_embd = alone
    return local


def groups_of_passes(
    model: torch.nn.Module, collection: ProcessGroupCollection
) -> Iterator[torch.distributed.ProcessGroup]:
    """Yield Megatron's groups over which passes of this stage and its gradients are reduced.

    Args:
        model: The model chunk in Megatron's DistributedDataParallel.
    """
    yield collection.tp  # the loss is reduced over it, also where it has one rank
    for name in ("cp", "ep"):
        group = getattr(collection, name, None)
        if group is not None and group.size() > 1:
            yield group
    for buffer in (*model.buffers, *model.expert_parallel_buffers):
        yield buffer.data_parallel_group


class StageLocalStatistics:
    """Makes the optimizer's norm, clipping and overflow checks stay within the stage; undoable.

    Attributes:
        groups: The groups that were created for it.
    """

    def __init__(
        self,
        optimizer: Any,
        create_within_stage: Callable[
            [torch.distributed.ProcessGroup], torch.distributed.ProcessGroup
        ],
    ):
        """Create the groups and put them in place; all ranks of the job have to do so.

        Args:
            create_within_stage: Returns the part of a group that lies on this stage.
        """
        self._optimizers = optimizer_parts(optimizer)
        self._originals = [part.get_grad_stats_parallel_group() for part in self._optimizers]
        self._parts = {
            original: create_within_stage(original) for original in dict.fromkeys(self._originals)
        }
        self.groups = tuple(self._parts.values())
        self.redo()

    def redo(self) -> None:
        """Put the groups in place, after ``undo``."""
        for part, original in zip(self._optimizers, self._originals):
            part.grad_stats_parallel_group = self._parts[original]

    def undo(self) -> None:
        """Give the optimizers their groups back."""
        for part, original in zip(self._optimizers, self._originals):
            part.grad_stats_parallel_group = original
