"""Links between stages of one process: what channel.py and link.py are between ranks."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from megatron_paci.report import Report
from megatron_paci.schedule import Action, Kind, StageSchedule


class Queues:
    """What is under way between two neighbours, the earlier one first."""

    def __init__(self):
        """Nothing is under way."""
        self.forwards: deque[torch.Tensor] = deque()
        self.gradients: deque[torch.Tensor] = deque()
        self.downstream: deque[Report] = deque()
        self.upstream: deque[Report] = deque()


class LocalChannel:
    """The links of a stage to neighbours in the same process; implements ``protocols.Channel``."""

    def __init__(self, previous: Queues | None, following: Queues | None):
        """Take the links to both neighbours; the outer ends of the pipeline have None."""
        self._previous = previous
        self._following = following

    def has_input(self, action: Action) -> bool:
        """Whether the message is there that ``action`` needs."""
        if action.kind is Kind.FORWARD:
            return self._previous is None or bool(self._previous.forwards)
        if action.kind is Kind.BACKWARD:
            return self._following is None or bool(self._following.gradients)
        return True

    def begin_stream(self, schedule: StageSchedule) -> None:
        """Nothing is counted here."""

    def expect_forwards(self, count: int) -> None:
        """Nothing is posted ahead here."""

    def receive_forward(self, microbatch: int, with_report: bool) -> torch.Tensor | None:
        """Return the previous stage's output, shape (sequence, microbatch size, hidden)."""
        return None if self._previous is None else self._previous.forwards.popleft()

    def send_forward(self, microbatch: int, output_tensor: torch.Tensor) -> None:
        """Hand on a copy: the engine releases the data of the output."""
        if self._following is not None:
            self._following.forwards.append(output_tensor.detach().clone().requires_grad_())

    def receive_backward(self, microbatch: int, with_report: bool) -> torch.Tensor | None:
        """Return the gradient of an output, None on the last stage."""
        return None if self._following is None else self._following.gradients.popleft()

    def send_backward(self, microbatch: int, input_grad: torch.Tensor) -> None:
        """Hand the gradient of an input back."""
        if self._previous is not None:
            self._previous.gradients.append(input_grad)

    def receive_downstream(self) -> Report | None:
        """Return the report behind the forward received last, None on the first stage."""
        return None if self._previous is None else self._previous.downstream.popleft()

    def send_downstream(self, report: Report) -> None:
        """Send a report behind the forward sent last."""
        if self._following is not None:
            self._following.downstream.append(report)

    def receive_upstream(self) -> Report | None:
        """Return the report behind the gradient received last, None on the last stage."""
        return None if self._following is None else self._following.upstream.popleft()

    def send_upstream(self, report: Report) -> None:
        """Send a report behind the gradient sent last."""
        if self._previous is not None:
            self._previous.upstream.append(report)

    def finish(self) -> None:
        """Nothing is left: a message has arrived as soon as it is sent."""


class LocalLink:
    """One end of the one-way link of a tied embedding; used as ``link.Link`` is."""

    def __init__(self, queue: deque[torch.Tensor], config: Any, *, dtype: torch.dtype):
        """Take the queue that both ends share; the rest is what ``Link`` asks for."""
        self._queue = queue
        self._posted = 0

    def send(self, number: int, tensor: torch.Tensor) -> None:
        """Send ``tensor``, which must not change any more."""
        self._queue.append(tensor.detach())

    def release_sent(self, arrived: int) -> None:
        """Nothing is held."""

    def finish(self) -> None:
        """Nothing is under way."""

    @property
    def has_posted(self) -> bool:
        """Whether a message is waited for."""
        return self._posted > 0

    def post_receive(self, shape: tuple[int, ...]) -> None:
        """Note that a message is waited for."""
        self._posted += 1

    def take(self) -> torch.Tensor:
        """Return the next message."""
        self._posted -= 1
        return self._queue.popleft()
