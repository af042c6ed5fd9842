"""A device that takes a given time for each pass and step, without computing.

Megatron's own functions run on a tiny model, and the rest of the time the rank sleeps, which takes
no processor: many stages fit on a few cores. A pass ends at an absolute time, so what the tiny
model computes is part of it, and all else that the host does (messages, the training loop) comes on
top, as on a device whose host does not run ahead.

A sleep ends late, by about 0.1 ms, more on a busy machine. A device does not: where the next pass
follows without a wait, it counts as begun when the last one should have ended, plus what the host
did in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_paci.patching import Patch, PatchSet

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
TRAINING = "megatron.training.training"
MOST_HOST_SECONDS = 1e-3
"""Between two passes; what takes longer counts as a wait, so that the lateness is not made up."""


class Pacer:
    """Makes work last as long as it is told to.

    Attributes:
        late: Seconds by which each end came late.
        overrun: How often the work itself took longer than it should have lasted.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._now = now
        self._sleep = sleep
        self._ended = float("-inf")
        self._overslept = 0.0
        self.late: list[float] = []
        self.overrun = 0

    def last(self, seconds: float, work: Callable[[], Any]) -> Any:
        """Do ``work``, return its result after ``seconds``, counted from when it could begin."""
        begin = self._now()
        if begin - self._ended < MOST_HOST_SECONDS:
            begin -= self._overslept
        end = begin + seconds
        result = work()
        overrun = self._now() > end
        while (rest := end - self._now()) > 0:
            self._sleep(rest)
        self._ended = self._now()
        self._overslept = 0.0 if overrun else self._ended - end
        self.overrun += overrun
        self.late.append(self._ended - end)
        return result


class EmulatedDevice:
    """The device of this rank."""

    def __init__(self, *, forward: float, backward: float, step: float):
        """Allocate; nothing is patched.

        Args:
            forward: Seconds of a forward pass of one model chunk.
            backward: Seconds of a backward pass of one model chunk.
            step: Seconds of an optimizer step; 0 for as long as that of the tiny model takes.
        """
        self.pacer = Pacer()
        self._forward = forward
        self._backward = backward
        self._step = step
        why = "emulates a device"
        self._patches = PatchSet(
            [
                Patch(
                    f"{SCHEDULES}:forward_step", self._forward_step, ("forward_step_func",), why
                ),
                Patch(
                    f"{SCHEDULES}:backward_step", self._backward_step,
                    ("input_tensor", "output_tensor", "output_tensor_grad"), why,
                ),
                Patch(
                    f"{TRAINING}:train", self._train,
                    ("forward_step_func", "model", "optimizer"), why,
                ),
            ]
        )

    def install(self) -> None:
        """Put the device in place; the plugin has to be installed before."""
        self._patches.install()

    def uninstall(self) -> None:
        """Give every wrapped function back."""
        self._patches.uninstall()

    def result(self) -> dict[str, Any]:
        """Return ``late``, the seconds by which ends came late, and ``overrun`` (``Pacer``)."""
        return {"late": self.pacer.late, "overrun": self.pacer.overrun}

    def _train(self, original, *args, **kwargs):
        # The leading parameters are those that the patch checks for.
        optimizer = kwargs["optimizer"] if "optimizer" in kwargs else args[2]
        step = optimizer.step_with_ready_grads
        if self._step:
            # The part of Megatron's step after the reduction of norms; PACI calls it alone.
            optimizer.step_with_ready_grads = lambda: self.pacer.last(self._step, step)
        try:
            return original(*args, **kwargs)
        finally:
            if self._step:
                del optimizer.step_with_ready_grads

    def _forward_step(self, original, *args, **kwargs):
        if not torch.is_grad_enabled():  # an evaluation
            return original(*args, **kwargs)
        return self.pacer.last(self._forward, lambda: original(*args, **kwargs))

    def _backward_step(self, original, *args, **kwargs):
        return self.pacer.last(self._backward, lambda: original(*args, **kwargs))
