"""The links of a stage to its neighbours, on Megatron's P2PCommunicator.

Receives are posted one message ahead, before the compute they overlap with. Sends are never waited
for while the stream runs: a sent tensor is kept alive until its arrival is certain, which the order
itself proves. Stage i + 1 has taken the forward of microbatch ``k + depth - 2`` when it sends the
gradient of ``k`` to stage i (it runs one microbatch less ahead than stage i, ``depth``), and stage
i - 1 has taken the gradient of ``k - depth - 1`` when it sends the forward of ``k``. So a wait for
such a send returns at once, on every backend; NCCL can also be asked earlier, gloo cannot (its
requests never report completion before they are waited for).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_paci.groups import StageGroups


class Link:
    """One direction between two neighbouring stages; a rank either sends or receives on it."""

    def __init__(self, group: torch.distributed.ProcessGroup, config: Any):
        # Megatron's communicator sees the sender and the receiver as a pipeline of two stages.
        self._communicator = P2PCommunicator(pp_group=group, config=config)
        self._sent: deque[tuple[int, Any, torch.Tensor]] = deque()
        self._posted: tuple[Any, torch.Tensor] | None = None

    def send(self, microbatch: int, tensor: torch.Tensor) -> None:
        """Post the send of ``tensor``, which must not change until it has arrived."""
        # A tensor of its own over the same memory: the caller may release the data of its one.
        message = tensor.detach()
        requests = self._communicate(send=message)
        self._sent.append((microbatch, requests[1]["send_next"], message))

    def release_sent(self, arrived: int) -> None:
        """Let go of the sends up to microbatch ``arrived``, and of others known to be complete."""
        while self._sent and (self._sent[0][0] <= arrived or self._sent[0][1].is_completed()):
            self._sent.popleft()[1].wait()

    def finish(self) -> None:
        """Wait for every send."""
        while self._sent:
            self._sent.popleft()[1].wait()

    def post_receive(self, shape: tuple[int, ...]) -> None:
        """Post the receive of the next message; without effect if one is posted already."""
        if self._posted is None:
            tensor, requests = self._communicate(receive_shape=shape)
            self._posted = requests["recv_prev"], tensor

    def take(self) -> torch.Tensor:
        """Wait for the message that was posted and return it; it requires grad."""
        request, tensor = self._posted
        self._posted = None
        request.wait()
        return tensor

    def _communicate(
        self, *, send: torch.Tensor | None = None, receive_shape: tuple[int, ...] | None = None
    ) -> tuple[torch.Tensor | None, dict[str, Any]]:
        received, _, requests = self._communicator._communicate(
            tensor_send_next=send,
            tensor_send_prev=None,
            recv_prev=receive_shape is not None,
            recv_next=False,
            tensor_shape=receive_shape,
            wait_on_reqs=False,
        )
        return received, requests


class PipelineChannel:
    """Both directions to both neighbours; implements ``engine.Channel``."""

    def __init__(
        self,
        groups: StageGroups,
        config: Any,
        *,
        depth: int,
        shape: Callable[[], tuple[int, ...]],
    ):
        """Set up the links; nothing is posted yet.

        Args:
            groups: The communicators of this rank.
            config: Megatron's model configuration; it is copied, not changed.
            depth: Most microbatches in flight on this stage.
            shape: Returns the shape of a message, (sequence, microbatch size, hidden).
        """
        config = copy.copy(config)
        config.batch_p2p_comm = False  # batched operations cannot be left pending
        config.use_ring_exchange_p2p = False
        self._depth = depth
        self._shape = shape
        self._forwards_to_come = 0
        self._backwards_to_come = 0

        def link(group: torch.distributed.ProcessGroup | None) -> Link | None:
            return None if group is None else Link(group, config)

        self._forward_in = link(groups.forward_from_previous)
        self._forward_out = link(groups.forward_to_next)
        self._backward_in = link(groups.backward_from_next)
        self._backward_out = link(groups.backward_to_previous)

    def expect_forwards(self, count: int) -> None:
        """Post the first receive of a run of ``count`` forwards.

        Nothing is posted beyond the run: after it the stream may be drained, and a receive whose
        message never comes would block its communicator and, on a GPU, every device
        synchronization.
        """
        self._forwards_to_come = count
        self._post_forward()

    def receive_forward(self, microbatch: int) -> torch.Tensor | None:
        """Return the previous stage's output, shape (sequence, microbatch size, hidden)."""
        if self._forward_in is None:
            return None
        tensor = self._forward_in.take()
        self._forwards_to_come -= 1
        self._post_forward()
        self._backward_out.release_sent(microbatch - self._depth - 1)
        return tensor

    def send_forward(self, microbatch: int, output_tensor: torch.Tensor) -> None:
        """Send an output to the next stage and post the receive of a gradient."""
        if self._forward_out is None:
            return
        self._forward_out.send(microbatch, output_tensor)
        self._backwards_to_come += 1
        self._backward_in.post_receive(self._shape())

    def receive_backward(self, microbatch: int) -> torch.Tensor | None:
        """Return the gradient of an output, None on the last stage."""
        if self._backward_in is None:
            return None
        gradient = self._backward_in.take()
        self._backwards_to_come -= 1
        # Every microbatch in flight gets its gradient, in this run or in the drain.
        if self._backwards_to_come:
            self._backward_in.post_receive(self._shape())
        self._forward_out.release_sent(microbatch + self._depth - 2)
        return gradient

    def send_backward(self, microbatch: int, input_grad: torch.Tensor) -> None:
        """Send the gradient of an input to the previous stage."""
        if self._backward_out is not None:
            self._backward_out.send(microbatch, input_grad)

    def finish(self) -> None:
        """Wait for all sends; at the end of a drain the neighbours have posted their receives."""
        for link in (self._forward_out, self._backward_out):
            if link is not None:
                link.finish()

    def _post_forward(self) -> None:
        if self._forward_in is not None and self._forwards_to_come:
            self._forward_in.post_receive(self._shape())
