"""What a plan comes to: busy time, idle time, throughput and memory of every stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real

from megatron_paci.schedule import StageSchedule
from megatron_paci.simulate.orders import Task, Work
from megatron_paci.simulate.schedules import Plan
from megatron_paci.simulate.timing import Costs, Event, timeline

MOST_PASSES = 500_000  # Less than a minute for all schedules.


@dataclass(frozen=True)
class Memory:
    """What a stage holds, in a unit of one's choice."""

    activations: Sequence[Real]
    """Of one microbatch, from its forward to its backward, per stage."""
    retained: Sequence[Real]
    """The part of them that is kept for the gradient of the weights, once that of the input is
    there; per stage."""
    static: Sequence[Real]
    """Weights, gradients and optimizer state, per stage."""

    @classmethod
    def in_microbatches(cls, num_stages: int, *, retained: Real = Fraction(1, 2)) -> Memory:
        """Return a memory that counts the activations of microbatches."""
        return cls([1] * num_stages, [retained] * num_stages, [0] * num_stages)


@dataclass(frozen=True)
class Figures:
    """Figures of a schedule in its steady state."""

    utilization: Sequence[Real]
    """Share of the time in which a stage computes, per stage."""
    iteration_time: Real
    """On average; of the slowest stage."""
    activations: Sequence[Real]
    """Most that a stage keeps at a time for backward passes, per stage."""
    memory: Sequence[Real]
    """The same with the static part."""
    drift: int

    @property
    def overall(self) -> Real:
        """Utilization of all stages together."""
        return sum(self.utilization) / Fraction(len(self.utilization))

    @property
    def bubble(self) -> Real:
        """Share of the time in which stages wait."""
        return 1 - self.overall


def measure(
    planned: Callable[[int], Plan], costs: Costs, memory: Memory, *, iterations: int = 1
) -> Figures:
    """Time a schedule and return its figures.

    Args:
        planned: Makes the plan for a number of iterations.
        iterations: So many at least are averaged over, where they can differ.
    """
    one = planned(1)
    first, measured = 0, 1  # With steps of all stages together every iteration is like the first.
    if not one.joint_steps:
        first, measured = _window(
            one.num_stages, one.num_microbatches, one.in_flight or 1, iterations
        )
    plan = planned(first + measured + 1)
    events = timeline(plan.orders, plan.path, costs, joint_steps=plan.joint_steps)
    span = (first * plan.num_microbatches, (first + measured) * plan.num_microbatches)
    windows = [
        window(events, stage, since=span[0], until=span[1]) for stage in range(plan.num_stages)
    ]
    kept = [
        peak(order, memory.activations[stage], memory.retained[stage], plan.chunks)
        for stage, order in enumerate(plan.orders)
    ]
    return Figures(
        utilization=[_share(busy, elapsed) for busy, elapsed in windows],
        iteration_time=max(_share(elapsed, measured) for _, elapsed in windows),
        activations=kept,
        memory=[static + most for static, most in zip(memory.static, kept)],
        drift=plan.drift,
    )


def num_passes(
    num_stages: int, num_microbatches: int, iterations: int, *, extra_in_flight: int = 0
) -> int:
    """Return how many forwards ``measure`` times for PACI, which needs most."""
    in_flight = StageSchedule(0, num_stages, 1, extra_in_flight).depth
    first, measured = _window(num_stages, num_microbatches, in_flight, iterations)
    return num_stages * num_microbatches * (first + measured + 1)


def _window(
    num_stages: int, num_microbatches: int, in_flight: int, iterations: int
) -> tuple[int, int]:
    """Return how many iterations come before the measured ones, and how many are measured.

    A round trip takes as many microbatches as the first stage has in flight, and what it costs
    repeats only with whole ones. So the figures are exact where no other round trip is slower.
    """
    whole = in_flight // math.gcd(num_microbatches, in_flight)
    filling = max(8 * num_stages, 4 * in_flight)
    return -(-filling // num_microbatches), whole * -(-iterations // whole)


def window(events: Sequence[Event], stage: int, *, since: int, until: int) -> tuple[Real, Real]:
    """Return the busy and the whole time of a stage between its forwards of two microbatches."""
    own = [event for event in events if event.stage == stage]
    begin, end = (
        next(event.start for event in own if event.task == Task(Work.FORWARD, microbatch))
        for microbatch in (since, until)
    )
    return sum(event.end - event.start for event in own if begin <= event.start < end), end - begin


def peak(order: Sequence[Task], activations: Real, retained: Real, chunks: int) -> Real:
    """Return the most that a stage keeps for backward passes, in the unit of ``activations``.

    Args:
        activations: Of a microbatch on the whole stage; a chunk has its share.
        retained: The part of it that stays until the backward of the weights.
    """
    changes = {
        Work.FORWARD: activations,
        Work.BACKWARD: -activations,
        Work.BACKWARD_INPUT: retained - activations,
        Work.BACKWARD_WEIGHT: -retained,
        Work.STEP: 0,
    }
    kept = most = 0
    for task in order:
        kept += changes[task.work]
        most = max(most, kept)
    return most if chunks == 1 else most * Fraction(1, chunks)


def _share(part: Real, whole: Real) -> Real:
    """Return a quotient, exact where both numbers are."""
    return part / whole if isinstance(part + whole, float) else Fraction(part) / Fraction(whole)
