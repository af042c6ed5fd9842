"""Process groups of a stage: the only place that creates any.

All of them are made once, before training, in the same order on all their members, and every link
is connected then; none appears inside the training loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch


@dataclass(frozen=True)
class StageGroups:
    """The communicators of one rank. The outer ends of the pipeline lack those on one side."""

    alone: torch.distributed.ProcessGroup
    """This rank alone: stands in where Megatron wants a group that must not span stages."""

    forward_from_previous: torch.distributed.ProcessGroup | None = None
    forward_to_next: torch.distributed.ProcessGroup | None = None
    backward_from_next: torch.distributed.ProcessGroup | None = None
    backward_to_previous: torch.distributed.ProcessGroup | None = None

    tied_gradient: torch.distributed.ProcessGroup | None = None
    """From the last stage to the first."""
    tied_weight: torch.distributed.ProcessGroup | None = None
    """From the first stage to the last."""

    shapes_from_previous: torch.distributed.ProcessGroup | None = None
    shapes_to_next: torch.distributed.ProcessGroup | None = None

    metrics_from_previous: torch.distributed.ProcessGroup | None = None
    metrics_to_next: torch.distributed.ProcessGroup | None = None

    telemetry_from_previous: torch.distributed.ProcessGroup | None = None
    telemetry_to_next: torch.distributed.ProcessGroup | None = None


def create_stage_groups(
    pp_group: torch.distributed.ProcessGroup,
    *,
    tied: bool = False,
    shapes: bool = False,
    metrics: bool = False,
    telemetry: bool = False,
    timeout: timedelta | None = None,
) -> StageGroups:
    """Create the groups of this rank; every rank of the job has to call it.

    Each pair of neighbouring stages gets one communicator per direction. The operations of one
    communicator complete in the order in which they were posted, so nothing else may share it:
    with a common one for both directions, or for the receives and the sends of a stage, a receive
    that is posted ahead would hold back every later send.

    Args:
        pp_group: The pipeline of this rank.
        tied: Whether this rank holds a weight that the first and the last stage share.
        shapes: Whether the shapes of messages vary and are sent, too; the same on all ranks.
        metrics: Whether router metrics go down the pipeline; the same on all ranks.
        telemetry: Whether figures for the log do; likewise.
        timeout: Time after which a message that does not come is an error; None for the default.
    """
    # PyTorch derives a group's name from how many were created before, so all ranks create all
    # groups in one order, those of other pipelines included.
    own = tuple(torch.distributed.get_process_group_ranks(pp_group)), tied
    everyone = [own] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    some_are_tied = any(holds_one for _, holds_one in everyone)
    rank = torch.distributed.get_rank()
    groups = {"alone": _new_group([rank], "PACI_ALONE", timeout, use_local_synchronization=True)}
    for ranks in sorted({ranks for ranks, _ in everyone}):
        for upper, lower in pairwise(ranks):
            forward = _new_link(upper, lower, "PACI_FORWARD", timeout)
            backward = _new_link(lower, upper, "PACI_BACKWARD", timeout)
            if rank == upper:
                groups |= {"forward_to_next": forward, "backward_from_next": backward}
            elif rank == lower:
                groups |= {"forward_from_previous": forward, "backward_to_previous": backward}
            wishes = {"shapes": shapes, "metrics": metrics, "telemetry": telemetry}
            for name, wanted in wishes.items():
                if wanted:
                    link = _new_link(upper, lower, f"PACI_{name.upper()}", timeout)
                    if rank == upper:
                        groups[f"{name}_to_next"] = link
                    elif rank == lower:
                        groups[f"{name}_from_previous"] = link
        if some_are_tied and len(ranks) > 1:
            gradient = _new_link(ranks[-1], ranks[0], "PACI_TIED_GRADIENT", timeout)
            weight = _new_link(ranks[0], ranks[-1], "PACI_TIED_WEIGHT", timeout)
            if rank in (ranks[0], ranks[-1]):
                groups |= {"tied_gradient": gradient, "tied_weight": weight}
    return StageGroups(**groups)


def create_group_within_stage(
    group: torch.distributed.ProcessGroup,
    pp_group: torch.distributed.ProcessGroup,
    *,
    timeout: timedelta | None = None,
) -> torch.distributed.ProcessGroup:
    """Create the part of ``group`` that lies on this rank's stage; all ranks of the job call it."""
    own = pp_group.rank(), torch.distributed.get_process_group_ranks(group)
    everyone: list[tuple[int, list[int]]] = [own] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    stage_of = [stage for stage, _ in everyone]
    parts = {
        tuple(member for member in ranks if stage_of[member] == stage) for stage, ranks in everyone
    }
    found = None
    for ranks in sorted(parts):
        part = _new_group(list(ranks), "PACI_WITHIN_STAGE", timeout)
        if torch.distributed.get_rank() in ranks:
            found = part
    return found


def _new_link(
    sender: int, receiver: int, description: str, timeout: timedelta | None
) -> torch.distributed.ProcessGroup:
    """Create a group for one-way messages and send one, so that the connection stands.

    NCCL makes it with the first message, and the host waits meanwhile until the other end sends or
    receives its first one. In the stream two neighbours would wait for each other so.
    """
    group = _new_group([sender, receiver], description, timeout)
    rank = torch.distributed.get_rank()
    if rank in (sender, receiver):
        message = torch.zeros(1, device=torch.cuda.current_device())
        if rank == sender:
            torch.distributed.isend(message, receiver, group=group).wait()
        else:
            torch.distributed.irecv(message, sender, group=group).wait()
    return group


def _new_group(
    ranks: list[int], description: str, timeout: timedelta | None, **options: Any
) -> torch.distributed.ProcessGroup:
    """Create a group whose ranks follow the given order, the sender first.

    Megatron's P2PCommunicator sends the messages of a two-rank group over that group only if the
    sender is its rank 0, and over the world group, which carries other messages too, otherwise.

    Raises:
        RuntimeError: This PyTorch sorts the ranks.
    """
    try:
        return torch.distributed.new_group(
            ranks, timeout=timeout, group_desc=description, sort_ranks=False, **options
        )
    except TypeError as error:
        raise RuntimeError(
            f"PACI needs PyTorch 2.12 or newer, whose process groups can keep the order of their "
            f"ranks; this is {torch.__version__}"
        ) from error


def connect(groups: Iterable[torch.distributed.ProcessGroup]) -> None:
    """Reduce a number over each group, so that its connections stand; all members call it.

    NCCL makes them at the first collective, and may wait for the device meanwhile. In the stream
    the device may then wait for messages of a stage that is kept waiting itself.
    """
    number = torch.zeros(1, device=torch.cuda.current_device())
    for group in dict.fromkeys(groups):
        torch.distributed.all_reduce(number, group=group)


def destroy_groups(groups: Iterable[torch.distributed.ProcessGroup | None]) -> None:
    """Destroy groups again; every member has to call it."""
    for group in groups:
        if group is not None:
            torch.distributed.destroy_process_group(group)
