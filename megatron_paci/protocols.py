"""What the engine is given: how passes are computed, messages travel and weights are updated."""

from __future__ import annotations

from typing import Any, Protocol

from megatron_paci.report import Report
from megatron_paci.schedule import StageSchedule


class Compute(Protocol):
    """The forward and backward pass of a stage."""

    def forward(self, microbatch: int, input_tensor: Any, first_of_version: bool) -> Any:
        """Return the output for one microbatch; the first stage gets None and reads its data."""

    def backward(self, input_tensor: Any, output_tensor: Any, output_grad: Any) -> Any:
        """Accumulate the weight gradients and return the gradient of the input."""

    def release(self, output_tensor: Any) -> None:
        """Free the data of an output that was handed to the channel; its graph stays."""


class Channel(Protocol):
    """The links to the neighbours; the outer ends of the pipeline hand out and take None."""

    def begin_stream(self, schedule: StageSchedule) -> None:
        """Start counting microbatches anew; everything sent before has arrived."""

    def expect_forwards(self, count: int) -> None:
        """Say how many forward messages this run will take, so receives can be posted ahead."""

    def receive_forward(self, microbatch: int, with_report: bool) -> Any:
        """Return the input of ``microbatch``; ``with_report`` if a report comes behind it."""

    def send_forward(self, microbatch: int, output_tensor: Any) -> None:
        """Send an output on; does not wait."""

    def receive_backward(self, microbatch: int, with_report: bool) -> Any:
        """Return the gradient of the output of ``microbatch``; ``with_report`` likewise."""

    def send_backward(self, microbatch: int, input_grad: Any) -> None:
        """Send the gradient of an input back; does not wait."""

    def receive_downstream(self) -> Report | None:
        """Return the report that came with the forward received last."""

    def send_downstream(self, report: Report) -> None:
        """Send a report behind the forward sent last."""

    def receive_upstream(self) -> Report | None:
        """Return the report that came with the gradient received last."""

    def send_upstream(self, report: Report) -> None:
        """Send a report behind the gradient sent last."""

    def finish(self) -> None:
        """Wait until everything sent has arrived; called at the end of a drain."""


class Window(Protocol):
    """The weight update of a stage."""

    def begin_stream(self, schedule: StageSchedule) -> None:
        """Take the schedule of the stream that begins; no window is open."""

    def prepare(self, last: bool) -> None:
        """Called before every backward; ``last`` if it completes the window."""

    def gather_weights(self) -> None:
        """Called before a backward that no forward with the same weights has preceded."""

    def close(self, window: int, later: Report | None) -> Report:
        """Complete the gradients of a window and return its report over this and later stages.

        Args:
            window: Steps taken before this one.
            later: The report of the later stages, None on the last stage.
        """

    def step(self) -> None:
        """Clip, update, advance the learning rate."""

    def hear(self, earlier: Report | None) -> None:
        """Take the report of the earlier stages, None on the first stage."""

    def tell(self, window: int) -> Report:
        """Return the report of ``window`` over this and earlier stages."""

    def settle(self) -> None:
        """Called at the end of a drain, when all stages have taken the same steps."""
