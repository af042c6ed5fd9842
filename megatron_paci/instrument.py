"""Puts a timeline (timeline.py) to what a rank does, under every schedule.

============== ===================================================================================
span           what
============== ===================================================================================
``F``, ``B``   forward and backward pass of a microbatch
``close``      completing the gradients of a window: reduced, their norm taken
``STEP``       a weight update: gradients clipped, optimizer stepped; under Megatron's own schedules
               it includes what ``close`` is for PACI, but not the reduction
``wait``       waiting for a message; ``message`` says which: ``F3`` for the output of microbatch
               3, ``B3`` for its gradient, ``R`` for a report; None where Megatron's own
               communicator sends and receives at once
``send``       a moment: a message left; ``message`` likewise
``settle``     the end of a drain, where all stages meet
``evaluate``   an evaluation
``checkpoint`` writing one
``iteration``  a moment: the end of an iteration; ``number`` counts from 1
============== ===================================================================================

Nothing of this exists unless something asks for it (``--paci-trace``, telemetry): what is off costs
nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_paci.patching import Patch, PatchSet
from megatron_paci.timeline import Clock, HostClock, Timeline


class StreamClock:
    """The time of the current CUDA stream, by events on it."""

    def __init__(self):
        self._start = self.mark()

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_over(self, mark: torch.cuda.Event) -> bool:
        """Whether the stream has passed ``mark``."""
        return mark.query()

    def seconds(self, mark: torch.cuda.Event) -> float:
        """Return the seconds from the clock's start to ``mark``; waits for it."""
        mark.synchronize()
        return self._start.elapsed_time(mark) / 1000


def device_clock(parameter: torch.Tensor) -> Clock:
    """Return the clock of where ``parameter`` lives."""
    return StreamClock() if parameter.is_cuda else HostClock()


class Instrument:
    """Notes the passes, steps and waits of a rank in a timeline, until it is closed."""

    def __init__(self, timeline: Timeline, optimizer: Any, stage: Any = None):
        """Start noting.

        Args:
            optimizer: Megatron's optimizer of this rank.
            stage: The ``MegatronStage`` under PACI, None under Megatron's own schedules.
        """
        self.timeline = timeline
        self._stage = stage
        self._engine = stage and stage.engine
        self._iteration = 0
        self._synchronous_iterations = 0
        self._forwards: dict[int, dict[str, Any]] = {}
        self._patches = PatchSet(
            (
                Patch(
                    "megatron.core.pipeline_parallel.schedules:forward_step",
                    self._forward, (), "times forwards",
                ),
                Patch(
                    "megatron.core.pipeline_parallel.schedules:backward_step",
                    self._backward, (), "times backwards",
                ),
                Patch(
                    "megatron.core.pipeline_parallel.p2p_communication:"
                    "P2PCommunicator._communicate",
                    self._communicate, (), "times waits",
                ),
            )
        )
        self._patches.install()
        if self._engine is not None:
            self._engine.channel = TimedChannel(self._engine, timeline)
            self._engine.window = TimedWindow(self._engine.window, timeline)
        step = optimizer.step  # PACI takes it in parts, which TimedWindow notes

        def timed_step(*args, **kwargs):
            with timeline.span("STEP"):
                return step(*args, **kwargs)

        optimizer.step = timed_step
        self._optimizer = optimizer

    def end_iteration(self) -> None:
        """Note the end of an iteration."""
        self._iteration += 1
        self._synchronous_iterations += not self._streams
        self.timeline.note("iteration", number=self._iteration)

    def close(self) -> None:
        """Undo what was put in place; the timeline keeps what it has."""
        self._patches.uninstall()
        if self._engine is not None:
            self._engine.channel = self._engine.channel.timed
            self._engine.window = self._engine.window.timed
        del self._optimizer.step

    @property
    def _streams(self) -> bool:
        """Whether PACI trains, and not Megatron's own schedule."""
        return self._stage is not None and not self._stage.suspended

    def _facts(self, **facts: Any) -> dict[str, Any]:
        stream = self._synchronous_iterations  # each is one
        if self._engine is not None:
            stream += self._engine.num_streams
        if self._streams:
            facts["version"] = self._engine.version
        return {"stream": stream, **facts}

    def _forward(self, original, *args, **kwargs):
        if not torch.is_grad_enabled():  # an evaluation
            return original(*args, **kwargs)
        facts = self._facts(microbatch=kwargs["current_microbatch"])
        if kwargs.get("vp_stage") is not None:
            facts["chunk"] = kwargs["vp_stage"]
        with self.timeline.span("F", **facts):
            result = original(*args, **kwargs)
        self._forwards[_identity(result[0])] = facts
        return result

    def _backward(self, original, input_tensor, output_tensor, *args, **kwargs):
        facts = self._forwards.pop(_identity(output_tensor), {})
        now = self._facts(microbatch=facts.get("microbatch"))
        if "chunk" in facts:
            now["chunk"] = facts["chunk"]
        if "version" in facts:
            now["drift"] = now["version"] - facts["version"]
        with self.timeline.span("B", **now):
            return original(input_tensor, output_tensor, *args, **kwargs)

    def _communicate(self, original, *args, **kwargs):
        if self._streams or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        with self.timeline.span("wait", message=None):
            return original(*args, **kwargs)


def _identity(output: Any) -> int:
    """Tell outputs apart, whose data may be gone; schedules pass on the very same tensors."""
    return id(output[0] if isinstance(output, list) else output)


class TimedChannel:
    """A channel of the engine whose waits and sends are noted."""

    def __init__(self, engine: Any, timeline: Timeline):
        self.timed = engine.channel
        self._timeline = timeline
        self._sends_forwards = engine.schedule.stage < engine.schedule.num_stages - 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.timed, name)

    def receive_forward(self, microbatch: int, with_report: bool) -> Any:
        """Wait for the input of a microbatch."""
        return self._wait(f"F{microbatch}", self.timed.receive_forward, microbatch, with_report)

    def receive_backward(self, microbatch: int, with_report: bool) -> Any:
        """Wait for the gradient of an output."""
        return self._wait(f"B{microbatch}", self.timed.receive_backward, microbatch, with_report)

    def receive_downstream(self) -> Any:
        """Wait for a report of the earlier stages."""
        return self._wait("R", self.timed.receive_downstream)

    def receive_upstream(self) -> Any:
        """Wait for a report of the later stages."""
        return self._wait("R", self.timed.receive_upstream)

    def send_forward(self, microbatch: int, output_tensor: Any) -> None:
        """Send an output on."""
        self.timed.send_forward(microbatch, output_tensor)
        if self._sends_forwards:
            self._note_send(f"F{microbatch}", output_tensor)

    def send_backward(self, microbatch: int, input_grad: Any) -> None:
        """Send a gradient back."""
        self.timed.send_backward(microbatch, input_grad)
        if input_grad is not None:
            self._note_send(f"B{microbatch}", input_grad)

    def _wait(self, message: str, receive: Any, *args: Any) -> Any:
        with self._timeline.span("wait", message=message):
            return receive(*args)

    def _note_send(self, message: str, tensor: Any) -> None:
        self._timeline.note(
            "send", message=message, bytes=tensor.numel() * tensor.element_size()
        )


class TimedWindow:
    """A window of the engine whose work is noted."""

    def __init__(self, timed: Any, timeline: Timeline):
        self.timed = timed
        self._timeline = timeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self.timed, name)

    def close(self, window: int, later: Any) -> Any:
        """Complete the gradients of a window."""
        with self._timeline.span("close", window=window):
            return self.timed.close(window, later)

    def step(self) -> None:
        """Update the weights."""
        with self._timeline.span("STEP"):
            self.timed.step()

    def settle(self) -> None:
        """Meet the other stages at the end of a drain."""
        with self._timeline.span("settle"):
            self.timed.settle()
