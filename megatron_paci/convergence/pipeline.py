"""All stages of a pipeline in one process, run in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_step
from megatron.training import get_args

from megatron_paci.convergence.local import Queues
from megatron_paci.convergence.settings import NORMS
from megatron_paci.convergence.stage import LocalStage, TiedQueues, Variant
from megatron_paci.convergence.window import norm_over_stages
from megatron_paci.schedule import Action


class LocalPipeline:
    """Trains a model cut into stages, each by the order of ``StageSchedule``.

    A stage takes its next action as soon as what it needs is there. Only the order of each stage
    decides what is computed, so this is what a distributed run computes.

    Attributes:
        stages: The first stage first.
    """

    def __init__(
        self,
        num_stages: int,
        *,
        accumulation: int,
        clip: str = "pipelined",
        variant: Variant | None = None,
    ):
        """Build the stages from Megatron's flags (``get_args``), for a job of one rank.

        Args:
            accumulation: Backward passes per optimizer step.
            clip: What norm ``--clip-grad`` is applied to, one of ``settings.NORMS``.

        Raises:
            ValueError: The clipping rule is unknown, or the flags ask for what ``_refuse_flags``
                names.
        """
        if clip not in NORMS:
            raise ValueError(f"clip {clip!r} is none of {', '.join(NORMS)}")
        _refuse_flags()
        links: list[Queues | None] = [None, *(Queues() for _ in range(num_stages - 1)), None]
        tied_queues = TiedQueues()
        self.stages = [
            LocalStage(
                index, num_stages, accumulation=accumulation,
                clip="local" if clip == "local" else "pipelined",
                previous=previous, following=following, tied_queues=tied_queues,
                variant=variant or Variant(),
            )
            for index, (previous, following) in enumerate(pairwise(links))
        ]
        self._orders = [Orders() for _ in self.stages]
        self._always_joint = clip == "global"
        first, last = self.stages[0].tied_weight, self.stages[-1].tied_weight
        if first is not None:
            with torch.no_grad():
                last.copy_(first)
        self.joint = self._always_joint

    @property
    def joint(self) -> bool:
        """Whether stages step together, as under 1F1B; see ``LocalWindow``."""
        return self.stages[0].window.joint

    @joint.setter
    def joint(self, value: bool) -> None:
        for stage in self.stages:
            stage.window.joint = value or self._always_joint

    @property
    def accumulation(self) -> int:
        """Backward passes per optimizer step."""
        return self.stages[0].engine.schedule.accumulation

    def set_accumulation(self, accumulation: int) -> None:
        """Change the window length, after a drain; without effect if it is the same."""
        if accumulation != self.accumulation:
            self.drain()
            for stage in self.stages:
                stage.engine.set_accumulation(accumulation)

    def run(
        self, forward_step_func: Callable, iterators: Sequence[Iterator], num_microbatches: int
    ) -> list[Any]:
        """Run ``num_microbatches`` forwards on every stage and what falls between them.

        Args:
            forward_step_func: As for Megatron's schedules.
            iterators: The data of each stage.

        Returns:
            What the loss function returned for logging, one entry per microbatch. With joint steps
            in a stream the last stage may be behind and return the rest with the next run.
        """
        for stage, iterator in zip(self.stages, iterators, strict=True):
            stage.compute.bind(forward_step_func, iterator, self.accumulation)
        for stage, orders in zip(self.stages, self._orders):
            orders.add(chain.from_iterable(stage.engine.ticks(num_microbatches)))
        self._execute()
        return self.stages[-1].compute.forward_data

    def drain(self) -> list[Any]:
        """Run the outstanding backwards and steps of all stages.

        Returns:
            As ``run``, for microbatches that no run has returned.
        """
        losses = self.stages[-1].compute.forward_data
        known = len(losses)
        for stage, orders in zip(self.stages, self._orders):
            orders.add(stage.engine.drain_actions())
        self._execute()
        assert not any(orders.next_action() for orders in self._orders), "the pipeline is stuck"
        outstanding = [stage.window.ledger.outstanding() for stage in self.stages]
        for stage in self.stages:
            stage.window.settle_jointly(outstanding)
            stage.engine.end_stream()
        return losses[known:]

    @torch.no_grad()
    def evaluate(
        self, forward_step_func: Callable, iterators: Sequence[Iterator], num_microbatches: int
    ) -> list[Any]:
        """Run forwards alone, after a drain; returns what the loss function did for logging."""
        found: list[Any] = []
        for stage in self.stages:
            stage.model.eval()
        for _ in range(num_microbatches):
            tensor = None
            for stage, iterator in zip(self.stages, iterators, strict=True):
                tensor, _ = forward_step(
                    forward_step_func, iterator, stage.model, 1, tensor, found, stage.config,
                    cp_group_size=1, is_last_stage=stage.is_last,
                )
        for stage in self.stages:
            stage.model.train()
        return found

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of all stages, after a drain."""
        return [stage.state_dict() for stage in self.stages]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Take what ``state_dict`` returned, before the first update."""
        for stage, state in zip(self.stages, states, strict=True):
            stage.load_state_dict(state)

    def _execute(self) -> None:
        """Let every stage execute its orders, as far as it can."""
        moved = True
        while moved:
            moved = False
            for stage, orders in zip(self.stages, self._orders):
                while (
                    (action := orders.next_action()) is not None
                    and not stage.window.waiting
                    and stage.channel.has_input(action)
                ):
                    stage.engine.execute(orders.take())
                    moved = True
            if all(stage.window.waiting for stage in self.stages):
                norm = norm_over_stages([stage.window for stage in self.stages])
                for stage in self.stages:
                    stage.window.step_jointly(norm)
                moved = True


class Orders:
    """What a stage has been told to execute and has not yet.

    An engine's actions may be asked for only when the ones before are executed.
    """

    def __init__(self):
        """Nothing is to be done."""
        self._left: deque[Iterator[Action]] = deque()
        self._next: Action | None = None

    def add(self, actions: Iterator[Action]) -> None:
        """Put actions behind those that are left."""
        self._left.append(actions)

    def next_action(self) -> Action | None:
        """Return the action to execute next, None if nothing is left."""
        while self._next is None and self._left:
            self._next = next(self._left[0], None)
            if self._next is None:
                self._left.popleft()
        return self._next

    def take(self) -> Action:
        """Likewise, and leave it to the caller to execute it now."""
        action, self._next = self._next, None
        return action


def _refuse_flags() -> None:
    """Refuse what the stages of one process cannot do as separate ones would."""
    args = get_args()
    reasons = {
        "dropout: the stages would share one random state": args.hidden_dropout
        or args.attention_dropout,
        "fp16: stages would have to share a loss scale": args.fp16,
        "more than one rank": torch.distributed.get_world_size() > 1,
        "experts: what routers log goes from rank to rank": args.num_experts,
    }
    if wrong := [reason for reason, given in reasons.items() if given]:
        raise ValueError(f"one process cannot stand for a pipeline with {'; '.join(wrong)}")
