"""A one-way link between two ranks, on Megatron's P2PCommunicator."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_paci.report import REPORT_LENGTH, Report


class Link:
    """One direction between two stages; a rank either sends or receives on it.

    Messages arrive in the order in which they were sent, activations and reports alike.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        config: Any,
        *,
        dtype: torch.dtype | None = None,
    ):
        """Set up one end; nothing is posted yet.

        Args:
            group: The two ranks, the sender first.
            config: Megatron's model configuration; copied, not changed.
            dtype: Type of the tensors; None for that of the pipeline's activations.
        """

        def communicator(dtype: torch.dtype) -> P2PCommunicator:
            own = copy.copy(config)
            own.pipeline_dtype = dtype
            own.batch_p2p_comm = False  # batched operations cannot be left pending
            own.use_ring_exchange_p2p = False
            own.variable_seq_lengths = False  # shapes have a link of their own
            return P2PCommunicator(pp_group=group, config=own)

        # Megatron's communicator sees the sender and the receiver as a pipeline of two stages; a
        # second one on the same group differs in the type of what it receives.
        self._tensors = communicator(dtype or config.pipeline_dtype)
        self._reports = communicator(torch.float64)
        self._sent: deque[tuple[int, Any, torch.Tensor]] = deque()
        self._posted: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, microbatch: int, tensor: torch.Tensor) -> None:
        """Post the send of ``tensor``, which must not change until it has arrived."""
        # A tensor of its own over the same memory: the caller may release the data of its one.
        self._post_send(self._tensors, microbatch, tensor.detach())

    def send_report(self, microbatch: int, report: Report) -> None:
        """Post the send of a report behind the message of ``microbatch``."""
        vector = torch.tensor(
            report.vector(), dtype=torch.float64, device=torch.cuda.current_device()
        )
        self._post_send(self._reports, microbatch, vector)

    def release_sent(self, arrived: int) -> None:
        """Let go of the sends up to microbatch ``arrived``, and of others known to be complete."""
        while self._sent and (self._sent[0][0] <= arrived or self._sent[0][1].is_completed()):
            self._sent.popleft()[1].wait()

    def finish(self) -> None:
        """Wait for every send."""
        while self._sent:
            self._sent.popleft()[1].wait()

    @property
    def has_posted(self) -> bool:
        """Whether a receive is pending."""
        return bool(self._posted)

    def post_receive(self, shape: tuple[int, ...]) -> None:
        """Post the receive of the next message."""
        self._post_receive(self._tensors, shape)

    def post_receive_report(self) -> None:
        """Post the receive of the next message, which is a report."""
        self._post_receive(self._reports, (REPORT_LENGTH,))

    def take(self) -> torch.Tensor:
        """Wait for the message that was posted first and return it; it requires grad."""
        request, tensor = self._posted.popleft()
        request.wait()
        return tensor

    def take_report(self) -> Report:
        """Likewise for a report."""
        return Report.from_vector(self.take().tolist())

    def _post_send(
        self, communicator: P2PCommunicator, microbatch: int, message: torch.Tensor
    ) -> None:
        _, requests = _communicate(communicator, send=message)
        self._sent.append((microbatch, requests["send_next"], message))

    def _post_receive(self, communicator: P2PCommunicator, shape: tuple[int, ...]) -> None:
        tensor, requests = _communicate(communicator, receive_shape=shape)
        self._posted.append((requests["recv_prev"], tensor))


def _communicate(
    communicator: P2PCommunicator,
    *,
    send: torch.Tensor | None = None,
    receive_shape: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor | None, dict[str, Any]]:
    received, _, requests = communicator._communicate(
        tensor_send_next=send,
        tensor_send_prev=None,
        recv_prev=receive_shape is not None,
        recv_next=False,
        tensor_shape=receive_shape,
        wait_on_reqs=False,
    )
    return received, requests
