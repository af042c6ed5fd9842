"""The links of a stage to its neighbours (link.py): which message goes when.

Receives are posted one message ahead, before the compute they overlap with. Sends are never waited
for while the stream runs: a sent tensor is kept alive until its arrival is certain, which the order
itself proves. With ``d`` for the depth of the stage that sends, that stage is in tick ``k + d - 1``
when it sends the gradient of ``k``, so stage i + 1 has then taken the forward of ``k + d - 1``; and
before tick ``k`` it has run the backward of ``k - d``, so stage i - 1 has taken the gradient of
``k - d`` when it sends the forward of ``k``. A report behind a gradient is taken in the same tick,
or with a deferred step in the next one. So a wait for such a send returns at once, on every
backend; NCCL can also be asked earlier, gloo cannot (its requests never report completion before
they are waited for).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from megatron_paci.groups import StageGroups
from megatron_paci.link import Link
from megatron_paci.report import Report
from megatron_paci.schedule import StageSchedule


class PipelineChannel:
    """Both directions to both neighbours; implements ``protocols.Channel``."""

    def __init__(
        self, groups: StageGroups, config: Any, *, shape: Callable[[], tuple[int, ...]]
    ):
        """Set up the links; nothing is posted yet.

        Args:
            groups: The communicators of this rank.
            config: Megatron's model configuration; it is copied, not changed.
            shape: Returns the shape of a message, (sequence, microbatch size, hidden). Not asked
                where ``groups`` has links for shapes: each forward message then brings its own.
        """
        self._shape = shape
        self._schedule: StageSchedule | None = None
        self._previous_depth = self._next_depth = 0
        # Next microbatch to post a receive for, and the ones received or sent last, by direction.
        self._next_forward = self._last_forward = self._end_of_run = 0
        self._next_backward = self._last_backward = self._sent_forwards = self._next_report = 0

        def link(group: torch.distributed.ProcessGroup | None) -> Link | None:
            return None if group is None else Link(group, config)

        self._forward_in = link(groups.forward_from_previous)
        self._forward_out = link(groups.forward_to_next)
        self._backward_in = link(groups.backward_from_next)
        self._backward_out = link(groups.backward_to_previous)
        # With variable sequence lengths.
        self._shape_in = link(groups.shapes_from_previous)
        self._shape_out = link(groups.shapes_to_next)
        self._sent_shapes: deque[tuple[int, ...]] = deque()

    def begin_stream(self, schedule: StageSchedule) -> None:
        """Start counting microbatches anew; everything sent before has arrived."""
        self._schedule = schedule
        self._previous_depth = schedule.depth_of(schedule.stage - 1)
        self._next_depth = schedule.depth_of(schedule.stage + 1)
        self._next_forward = self._last_forward = self._end_of_run = 0
        self._next_backward = self._last_backward = self._sent_forwards = self._next_report = 0

    def expect_forwards(self, count: int) -> None:
        """Post the first receive of a run of ``count`` forwards.

        Nothing is posted beyond the run: after it the stream may be drained, and a receive whose
        message never comes would block its communicator and, on a GPU, every device
        synchronization.
        """
        self._end_of_run += count
        self._post_forward()

    def receive_forward(self, microbatch: int, with_report: bool) -> torch.Tensor | None:
        """Return the previous stage's output, shape (sequence, microbatch size, hidden)."""
        self._last_forward = microbatch
        if self._forward_in is None:
            return None
        if self._shape_in is not None:
            self._post_behind_shape()
        tensor = self._forward_in.take()
        if with_report:
            self._forward_in.post_receive_report()
        else:
            self._post_forward()
        self._backward_out.release_sent(microbatch - self._previous_depth)
        return tensor

    def receive_downstream(self) -> Report | None:
        """Return the report behind the forward received last, None on the first stage."""
        if self._forward_in is None:
            return None
        report = self._forward_in.take_report()
        self._post_forward()
        return report

    def send_forward(self, microbatch: int, output_tensor: torch.Tensor) -> None:
        """Send an output to the next stage and post the receive of a gradient."""
        if self._forward_out is None:
            return
        if not self._schedule.defer_step:
            self._post_upstream(microbatch - self._schedule.depth + 1)
        shape = output_tensor.shape
        if self._shape_out is not None:
            self._shape_out.send_numbers(microbatch, shape)
        elif shape != self._shape():
            raise ValueError(
                f"the output of microbatch {microbatch} has shape {tuple(shape)}, the next stage "
                f"expects {self._shape()}: set variable_seq_lengths in the model's configuration "
                "where microbatches differ"
            )
        # A tensor of its own over the same memory: the engine releases the data of the output.
        self._forward_out.send(microbatch, output_tensor.data)
        self._sent_shapes.append(shape)
        self._sent_forwards += 1
        # The next stage sends its first gradient after it has taken this many forwards. A receive
        # posted before that would let whoever waits for the device wait for this stage itself.
        if self._sent_forwards >= self._next_depth:
            self._post_backward()
        else:  # no gradient has come yet that would prove an arrival; NCCL knows of some
            self._forward_out.release_sent(-1)

    def send_downstream(self, report: Report) -> None:
        """Send a report behind the forward sent last."""
        if self._forward_out is not None:
            self._forward_out.send_report(self._last_forward, report)

    def receive_backward(self, microbatch: int, with_report: bool) -> torch.Tensor | None:
        """Return the gradient of an output, None on the last stage."""
        self._last_backward = microbatch
        if self._backward_in is None:
            return None
        # Both are posted already unless no forward came before, or the step is deferred: then the
        # next stage reports only after the forward that was sent last.
        if self._next_backward <= microbatch:
            self._post_backward()
        if with_report:
            self._post_upstream(microbatch)
        gradient = self._backward_in.take()
        if not with_report:
            self._post_backward()
        taken = microbatch + self._next_depth - 1
        self._forward_out.release_sent(taken)
        if self._shape_out is not None:
            self._shape_out.release_sent(taken)
        return gradient

    def receive_upstream(self) -> Report | None:
        """Return the report behind the gradient received last, None on the last stage."""
        if self._backward_in is None:
            return None
        report = self._backward_in.take_report()
        self._post_backward()
        return report

    def send_backward(self, microbatch: int, input_grad: torch.Tensor) -> None:
        """Send the gradient of an input to the previous stage."""
        if self._backward_out is not None:
            self._backward_out.send(microbatch, input_grad)

    def send_upstream(self, report: Report) -> None:
        """Send a report behind the gradient sent last."""
        if self._backward_out is not None:
            taken_with = self._last_backward + self._schedule.defer_step
            self._backward_out.send_report(taken_with, report)

    def finish(self) -> None:
        """Wait for all sends; at the end of a drain the neighbours have posted their receives."""
        for link in (self._forward_out, self._backward_out, self._shape_out):
            if link is not None:
                link.finish()

    def _post_forward(self) -> None:
        """Post the receive of one forward, if it comes in this run."""
        if self._shape_in is not None:  # the message is posted when its shape is known
            if not self._shape_in.has_posted and self._next_forward < self._end_of_run:
                self._shape_in.post_receive_numbers(3)
                self._next_forward += 1
            return
        link = self._forward_in
        if link is None or link.has_posted or self._next_forward == self._end_of_run:
            return
        link.post_receive(self._shape())
        self._next_forward += 1

    def _post_behind_shape(self) -> None:
        """Take the shape of a forward and post its receive."""
        self._forward_in.post_receive(tuple(map(int, self._shape_in.take_numbers())))

    def _post_backward(self) -> None:
        """Post the receive of one gradient.

        Every microbatch in flight gets its gradient, in this run or in the drain.
        """
        link = self._backward_in
        if link.has_posted or self._next_backward == self._sent_forwards:
            return
        link.post_receive(self._sent_shapes.popleft())
        self._next_backward += 1

    def _post_upstream(self, microbatch: int) -> None:
        """Post the receive of the report behind the gradient of ``microbatch``, if there is one.

        Not together with the gradient, when the forward before it is still to be computed: where
        all streams share one hardware queue, a receive that waits for another one holds back
        whatever the host issues after it.
        """
        if microbatch >= self._next_report and self._schedule.ends_window(microbatch):
            self._backward_in.post_receive_report()
            self._next_report = microbatch + 1
