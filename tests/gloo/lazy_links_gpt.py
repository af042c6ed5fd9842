"""examples/pretrain_gpt.py on links that connect as NCCL's do: with their first message.

The host waits in it until the other end sends or receives its first one.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch

from examples import pretrain_gpt


def connecting(operation: Callable, connected: set) -> Callable:
    def first_waits(tensor, peer, *args, group=None, **kwargs):
        if group is not None and group.size() == 2 and group not in connected:
            connected.add(group)
            torch.distributed.barrier(group=group)
        return operation(tensor, peer, *args, group=group, **kwargs)

    return first_waits


if __name__ == "__main__":
    connected: set = set()
    with mock.patch.multiple(
        torch.distributed,
        isend=connecting(torch.distributed.isend, connected),
        irecv=connecting(torch.distributed.irecv, connected),
    ):
        pretrain_gpt.main()
