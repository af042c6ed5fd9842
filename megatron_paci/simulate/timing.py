"""Times orders: when each task of each stage begins and ends.

A pass begins as soon as its stage is free and its input is there; a message between two stages
takes ``latency``. All numbers are in units of each other; exact ones (int, Fraction) stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real

from megatron_paci.simulate.orders import Task, Work

Path = Sequence[tuple[int, int]]
"""The (stage, chunk) pairs that a microbatch goes through, in the order of the model."""


@dataclass(frozen=True)
class Costs:
    """How long things take, per stage; a model chunk out of ``v`` takes 1/v of its stage."""

    forward: Sequence[Real]
    backward_input: Sequence[Real]
    backward_weight: Sequence[Real]
    step: Sequence[Real]
    latency: Real = 0

    @classmethod
    def equal(
        cls,
        num_stages: int,
        *,
        forward: Real = 1,
        backward_input: Real = 1,
        backward_weight: Real = 1,
        step: Real = 0,
        latency: Real = 0,
    ) -> Costs:
        """Return the costs of stages that take equally long."""
        lists = ([value] * num_stages for value in (forward, backward_input, backward_weight, step))
        return cls(*lists, latency)

    def of(self, work: Work, stage: int) -> Real:
        """Return the time of a task over all chunks of ``stage``."""
        match work:
            case Work.FORWARD:
                return self.forward[stage]
            case Work.BACKWARD:
                return self.backward_input[stage] + self.backward_weight[stage]
            case Work.BACKWARD_INPUT:
                return self.backward_input[stage]
            case Work.BACKWARD_WEIGHT:
                return self.backward_weight[stage]
            case Work.STEP:
                return self.step[stage]


@dataclass(frozen=True, slots=True)
class Event:
    """One task on the time line."""

    stage: int
    task: Task
    start: Real
    end: Real


def timeline(
    orders: Sequence[Sequence[Task]], path: Path, costs: Costs, *, joint_steps: bool = False
) -> list[Event]:
    """Return every task with its times; those of one stage are in its order.

    Args:
        orders: The tasks of each stage, first stage first.
        path: Where microbatches go.
        joint_steps: Whether an optimizer step waits for all stages to come to it, and they go on
            together, as with Megatron's global gradient norm and its check of the update.

    Raises:
        ValueError: The orders wait for each other.
    """
    num_stages = len(orders)
    chunks = len(path) // num_stages
    lengths = {
        (work, stage): costs.of(work, stage)
        if chunks == 1 or work is Work.STEP
        else costs.of(work, stage) * Fraction(1, chunks)
        for work in Work
        for stage in range(num_stages)
    }
    place = {pair: position for position, pair in enumerate(path)}
    # The end of what produces an activation or a gradient, by microbatch and position on the path.
    forwards: dict[tuple[int, int], Real] = {}
    backwards: dict[tuple[int, int], Real] = {}
    free: list[Real] = [0] * num_stages
    position = [0] * num_stages
    at_step: dict[int, set[int]] = {}
    events: list[Event] = []

    def arrival(stage: int, task: Task) -> Real | None:
        """Return when the input of a pass is there; None if that is not known yet."""
        here = place[stage, task.chunk]
        if task.work is Work.BACKWARD_WEIGHT:
            return backwards.get((task.index, here))
        if task.work is Work.FORWARD:
            source, known = here - 1, forwards
        else:
            source, known = here + 1, backwards
            if source == len(path):
                return forwards.get((task.index, here))
            if (task.index, here) not in forwards:
                return None
        if source < 0:
            return 0
        end = known.get((task.index, source))
        if end is None or path[source][0] == stage:
            return end
        return end + costs.latency

    def take(stage: int, task: Task, start: Real) -> None:
        end = start + lengths[task.work, stage]
        if task.work is Work.FORWARD:
            forwards[task.index, place[stage, task.chunk]] = end
        elif task.work in (Work.BACKWARD, Work.BACKWARD_INPUT):
            backwards[task.index, place[stage, task.chunk]] = end
        events.append(Event(stage, task, start, end))
        free[stage] = end
        position[stage] += 1

    def advance(stage: int) -> None:
        """Take what ``stage`` can take now."""
        order = orders[stage]
        while position[stage] < len(order):
            task = order[position[stage]]
            if task.work is Work.STEP and joint_steps:
                waiting = at_step.setdefault(task.index, set())
                waiting.add(stage)
                if len(waiting) < num_stages:
                    return
                start = max(free)
                for each in range(num_stages):
                    take(each, task, start)
                free[:] = [max(free)] * num_stages
                continue
            ready = 0 if task.work is Work.STEP else arrival(stage, task)
            if ready is None:
                return
            take(stage, task, max(free[stage], ready))

    while any(position[stage] < len(order) for stage, order in enumerate(orders)):
        before = len(events)
        for stage in range(num_stages):
            advance(stage)
        if len(events) == before:
            stuck = [
                f"stage {stage} at {order[position[stage]]}"
                for stage, order in enumerate(orders)
                if position[stage] < len(order)
            ]
            raise ValueError("the orders of the stages wait for each other: " + ", ".join(stuck))
    return events
