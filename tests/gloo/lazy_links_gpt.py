"""examples/pretrain_gpt.py on links that connect as NCCL's do: with their first message.

The host waits in it until the other end sends or receives its first one.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch

from examples import pretrain_gpt


def connecting(operation: Callable, connected: set) -> Callable:
    def first_waits(*args, group=None, **kwargs):
        if group is not None and group.group_desc.startswith("PACI") and group not in connected:
            connected.add(group)
            torch.distributed.barrier(group=group)
        return operation(*args, group=group, **kwargs)

    return first_waits


if __name__ == "__main__":
    links: set = set()
    operations = {
        name: connecting(getattr(torch.distributed, name), links) for name in ("isend", "irecv")
    }
    with (
        mock.patch.multiple(torch.distributed, **operations),
        mock.patch.multiple(torch.distributed.distributed_c10d, **operations),
    ):
        pretrain_gpt.main()
