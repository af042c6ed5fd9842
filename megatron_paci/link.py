"""A one-way link between two ranks, on Megatron's P2PCommunicator."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_paci.report import REPORT_LENGTH, Report


class Link:
    """One direction between two stages; a rank either sends or receives on it.

    Messages arrive in the order in which they were sent, tensors and numbers alike. Numbers are
    what the host makes and reads itself, reports and shapes. They go by a CUDA stream of their own:
    copying them to or from the device by the current stream would let the host wait for all that
    was issued there before, so for the compute of this stage.
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
        # second one on the same group differs in the type of what it receives. Receive buffers
        # require grad, so not even shapes are integers.
        self._tensors = communicator(dtype or config.pipeline_dtype)
        self._numbers = communicator(torch.float64)
        self._aside = torch.cuda.stream(torch.cuda.Stream())
        self._sent: deque[tuple[int, Any, torch.Tensor]] = deque()
        self._posted: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, microbatch: int, tensor: torch.Tensor) -> None:
        """Post the send of ``tensor``, which must not change or be freed until it has arrived."""
        self._sent.append((microbatch, _post_send(self._tensors, tensor), tensor))

    def send_numbers(self, microbatch: int, numbers: Sequence[float]) -> None:
        """Post the send of numbers that belong to the message of ``microbatch``."""
        with self._aside:
            vector = torch.tensor(
                numbers, dtype=torch.float64, device=torch.cuda.current_device()
            )
            request = RequestAside(_post_send(self._numbers, vector), self._aside)
        self._sent.append((microbatch, request, vector))

    def send_report(self, microbatch: int, report: Report) -> None:
        """Likewise for a report."""
        self.send_numbers(microbatch, report.vector())

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
        self._posted.append(_post_receive(self._tensors, shape))

    def post_receive_numbers(self, count: int) -> None:
        """Post the receive of the next message, which is ``count`` numbers."""
        with self._aside:
            self._posted.append(_post_receive(self._numbers, (count,)))

    def post_receive_report(self) -> None:
        """Post the receive of the next message, which is a report."""
        self.post_receive_numbers(REPORT_LENGTH)

    def take(self) -> torch.Tensor:
        """Wait for the message that was posted first and return it; it requires grad."""
        request, tensor = self._posted.popleft()
        request.wait()
        return tensor

    def take_numbers(self) -> list[float]:
        """Likewise for numbers; the host waits until they are here."""
        with self._aside:
            return self.take().tolist()

    def take_report(self) -> Report:
        """Likewise for a report."""
        return Report.from_vector(self.take_numbers())


class RequestAside:
    """A request that another stream waits for: the one whose memory the message is."""

    def __init__(self, request: Any, stream: AbstractContextManager):
        self._request = request
        self._stream = stream
        self.is_completed = request.is_completed

    def wait(self) -> None:
        """Let the stream wait."""
        with self._stream:
            self._request.wait()


def _post_send(communicator: P2PCommunicator, tensor: torch.Tensor) -> Any:
    _, _, requests = communicator._communicate(
        tensor_send_next=tensor,
        tensor_send_prev=None,
        recv_prev=False,
        recv_next=False,
        tensor_shape=None,
        wait_on_reqs=False,
    )
    return requests["send_next"]


def _post_receive(
    communicator: P2PCommunicator, shape: tuple[int, ...]
) -> tuple[Any, torch.Tensor]:
    tensor, _, requests = communicator._communicate(
        tensor_send_next=None,
        tensor_send_prev=None,
        recv_prev=True,
        recv_next=False,
        tensor_shape=shape,
        wait_on_reqs=False,
    )
    return requests["recv_prev"], tensor
