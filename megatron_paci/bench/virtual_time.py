"""Virtual time: how efficient a pipeline schedule is, measured without GPUs and without noise.

Every rank of a real training run gets a logical clock. A pass or an optimizer step adds its cost; a
message brings its sender's time along; a collective sets all its members to the latest of them.
Nothing of the schedule is known here: it is seen only through what it computes and communicates,
so Megatron's schedules and PACI are measured in the same way, and a collective that somebody has
forgotten anywhere in the training loop shows up as idle time, with its call site::

    measurement = VirtualTime(costs=Costs.parse(forward="1", backward="2", num_stages=4))
    measurement.install()      # after megatron_paci.install(), before training
    ...                        # megatron.training.pretrain(...)
    result = measurement.result(warmup=3, iterations=20)
    measurement.uninstall()
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from megatron.core import mpu
from torch.distributed import distributed_c10d as c10d

from megatron_paci.bench.clock import VirtualClock
from megatron_paci.bench.communication import Communication
from megatron_paci.bench.costs import Costs
from megatron_paci.bench.exchange import Exchange
from megatron_paci.bench.results import stage_result
from megatron_paci.patching import Patch, PatchSet

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
TRAINING = "megatron.training.training"
SCHEDULE_FUNCTIONS = (
    f"{SCHEDULES}:forward_backward_no_pipelining",
    f"{SCHEDULES}:forward_backward_pipelining_without_interleaving",
    f"{SCHEDULES}:forward_backward_pipelining_with_interleaving",
    "megatron_paci.forward_backward:forward_backward_pipelining_paci",
)


@dataclass
class _Rank:
    """What is known once training begins."""

    stage: int
    num_chunks: int
    communication: Communication
    patches: PatchSet


class VirtualTime:
    """Measures one training run of this process.

    Attributes:
        clock: This rank's clock, for what ``result`` does not tell.
    """

    def __init__(self, *, costs: Costs, latency: Fraction = Fraction(0)):
        """Allocate; nothing is patched.

        Args:
            costs: Virtual time of passes and steps, per stage.
            latency: Virtual time that a message between two stages travels.
        """
        self.clock = VirtualClock(latency=latency)
        self._costs = costs
        self._rank: _Rank | None = None
        why = "measures virtual time"
        schedule = [
            Patch(target, self._schedule_function, ("forward_step_func",), why)
            for target in SCHEDULE_FUNCTIONS
        ]
        self._patches = PatchSet(
            [
                *schedule,
                Patch(f"{SCHEDULES}:forward_step", self._forward_step, ("forward_step_func",), why),
                Patch(
                    f"{SCHEDULES}:backward_step",
                    self._backward_step,
                    ("input_tensor", "output_tensor", "output_tensor_grad"),
                    why,
                ),
                Patch(
                    f"{TRAINING}:train",
                    self._train,
                    ("forward_step_func", "model", "optimizer"),
                    why,
                ),
                Patch(f"{TRAINING}:train_step", self._train_step, ("forward_step_func",), why),
            ]
        )

    def install(self) -> None:
        """Put the wrappers in place; the plugin, if it is used, has to be installed before.

        Raises:
            megatron_paci.patching.PatchError: This version of Megatron lacks a function to wrap.
        """
        self._patches.install()

    def uninstall(self) -> None:
        """Give every wrapped function back, by identity."""
        if self._rank is not None:
            self._rank.communication.close()
            self._rank.patches.uninstall()
            self._rank = None
        self._patches.uninstall()

    def result(self, *, warmup: int, iterations: int) -> dict[str, Any]:
        """Return what this rank saw in ``iterations`` iterations after the first ``warmup``.

        See ``results.stage_result`` for the keys.

        Raises:
            RuntimeError: Training did not begin, or ended before that many iterations.
        """
        if self._rank is None or len(self.clock.iterations) <= warmup + iterations:
            raise RuntimeError(
                f"{len(self.clock.iterations) - 1} iterations were trained under virtual time, "
                f"too few for a warm-up of {warmup} and {iterations} measured ones"
            )
        begin, end = self.clock.iterations[warmup], self.clock.iterations[warmup + iterations]
        return stage_result(begin, end, stage=self._rank.stage, iterations=iterations)

    def _train(self, original, *args, **kwargs):
        # The leading parameters are those that the patch checks for.
        model = kwargs["model"] if "model" in kwargs else args[1]
        optimizer = kwargs["optimizer"] if "optimizer" in kwargs else args[2]
        if self._rank is None:
            self._rank = self._begin(len(model) if isinstance(model, list) else 1)
        if optimizer is None:
            return original(*args, **kwargs)
        # The part of Megatron's step after the reduction of norms; PACI calls it alone. It is
        # wrapped in this object only, since it may call that of others inside.
        step = optimizer.step_with_ready_grads

        def timed_step(*step_args, **step_kwargs):
            self.clock.work(self._costs.step[self._rank.stage])
            return step(*step_args, **step_kwargs)

        optimizer.step_with_ready_grads = timed_step
        try:
            return original(*args, **kwargs)
        finally:
            del optimizer.step_with_ready_grads

    def _begin(self, num_chunks: int) -> _Rank:
        """Put clocks on communication; no message may be on its way."""
        store = c10d._get_default_store()
        # A connection of its own: a wait for a key would hold up whoever shares it.
        store = store.clone() if hasattr(store, "clone") else store
        rank = torch.distributed.get_rank()
        exchange = Exchange(c10d.PrefixStore("megatron_paci_virtual_time", store), rank=rank)
        stage = mpu.get_pipeline_model_parallel_rank()
        everyone = list(range(torch.distributed.get_world_size()))
        stages = exchange.members(exchange.enter("stages", stage), everyone)
        communication = Communication(self.clock, exchange, stages=[int(text) for text in stages])
        patches = PatchSet(communication.patches())
        patches.install()
        return _Rank(stage, num_chunks, communication, patches)

    def _train_step(self, original, *args, **kwargs):
        result = original(*args, **kwargs)
        self.clock.end_iteration()
        if self._rank is not None:
            self._rank.communication.end_iteration()
        return result

    def _schedule_function(self, original, *args, **kwargs):
        if kwargs.get("forward_only"):
            return original(*args, **kwargs)
        with self.clock.inside_schedule():
            return original(*args, **kwargs)

    def _forward_step(self, original, *args, **kwargs):
        result = original(*args, **kwargs)
        # After what the pass waits for: its weights may still be on their way. Evaluation, which
        # does not record gradients, takes no virtual time.
        if self._rank is not None and torch.is_grad_enabled():
            rank = self._rank
            self.clock.work(self._costs.forward[rank.stage] / rank.num_chunks)
            rank.communication.produced(result[0], "forward")
        return result

    def _backward_step(self, original, *args, **kwargs):
        if self._rank is None:
            return original(*args, **kwargs)
        rank = self._rank
        # Before what the pass sends: reductions of gradients start when they are there.
        self.clock.work(self._costs.backward[rank.stage] / rank.num_chunks)
        result = original(*args, **kwargs)
        rank.communication.produced(result, "backward")
        return result
