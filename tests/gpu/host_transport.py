"""Messages of GPU tensors over gloo, through the memory of the host.

gloo sends and receives tensors of the CPU alone, and of its reductions those that are coalesced
refuse a GPU's; Megatron uses both. So for this check the three methods of a process group that it
lacks take a way around: a message is copied to the host before it is sent and to the GPU when it
has been received. The numbers are the same. The copy waits for what the GPU has computed, so over
gloo host and GPU overlap less than over NCCL, which needs none of this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup


class Received:
    """A request whose message is put in place as soon as it is waited for."""

    def __init__(self, request: Any, host: torch.Tensor, place: torch.Tensor):
        self._request, self._host, self._place = request, host, place

    def wait(self, *args: Any) -> bool:
        """Wait for the message and copy it to the GPU."""
        self._request.wait(*args)
        with torch.no_grad():
            self._place.copy_(self._host)
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._request.is_completed()


class Joined:
    """Several requests as one."""

    def __init__(self, requests: list[Any]):
        self._requests = requests

    def wait(self, *args: Any) -> bool:
        """Wait for all."""
        for request in self._requests:
            request.wait(*args)
        return True

    def is_completed(self) -> bool:
        """Whether all are complete."""
        return all(request.is_completed() for request in self._requests)


@contextlib.contextmanager
def host_transport(through_host: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """While it lasts, the tensors that ``through_host`` is true for go through the host.

    Args:
        through_host: Asked for every tensor of a message or a coalesced reduction.
    """
    send, receive = ProcessGroup.send, ProcessGroup.recv
    reduce = ProcessGroup.allreduce_coalesced

    def send_from_host(group: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
        # The request keeps the copy alive. A copy is made on the CPU, too, where "cpu" makes none.
        copies = [
            tensor.detach().to("cpu", copy=True) if through_host(tensor) else tensor
            for tensor in tensors
        ]
        return send(group, copies, *args)

    def receive_on_host(group: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
        [tensor] = tensors
        if not through_host(tensor):
            return receive(group, tensors, *args)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return Received(receive(group, [host], *args), host, tensor)

    def reduce_one_by_one(group: Any, tensors: list[torch.Tensor], options: Any) -> Any:
        if not any(map(through_host, tensors)):
            return reduce(group, tensors, options)
        each = torch.distributed.AllreduceOptions()
        each.reduceOp = options.reduceOp
        return Joined([group.allreduce([tensor], each) for tensor in tensors])

    ProcessGroup.send, ProcessGroup.recv = send_from_host, receive_on_host
    ProcessGroup.allreduce_coalesced = reduce_one_by_one
    try:
        yield
    finally:
        ProcessGroup.send, ProcessGroup.recv = send, receive
        ProcessGroup.allreduce_coalesced = reduce
