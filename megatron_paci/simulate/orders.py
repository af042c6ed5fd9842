"""The orders of pipeline schedules as data: which passes a stage makes, in which sequence.

Pure Python, like ``megatron_paci.schedule``, whose order PACI and 1F1B take. Every generator here
yields one iteration of one stage; microbatches count from 0. A schedule that splits the backward
makes the gradient of the input first (it is what the stage before waits for), and that of the
weights when there is time.

References: GPipe (arXiv 1811.06965), interleaved 1F1B (2104.04473), zero bubble (2401.10241).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_paci.schedule import Action, Kind, StageSchedule


class Work(enum.Enum):
    """What a task does."""

    FORWARD = "F"
    BACKWARD = "B"
    """Both gradients in one pass."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    STEP = "STEP"


@dataclass(frozen=True, slots=True)
class Task:
    """One unit of a stage's work; its text is ``F3``, ``STEP0`` or, in a later chunk, ``F3.1``."""

    work: Work
    index: int
    """Of the microbatch, or of the step."""
    chunk: int = 0
    """Which of the stage's model chunks; 0 for a step."""

    def __str__(self) -> str:
        return f"{self.work.value}{self.index}" + (f".{self.chunk}" if self.chunk else "")


def from_actions(actions: Iterator[Action]) -> Iterator[Task]:
    """Yield the actions of ``megatron_paci.schedule`` as tasks, with their steps counted."""
    steps = 0
    for action in actions:
        if action.kind is Kind.STEP:
            yield Task(Work.STEP, steps)
            steps += 1
        else:
            yield Task(Work(action.kind.value), action.microbatch)


def gpipe(num_microbatches: int) -> Iterator[Task]:
    """Yield all forwards, then all backwards; the same on every stage."""
    yield from (Task(Work.FORWARD, index) for index in range(num_microbatches))
    yield from (Task(Work.BACKWARD, index) for index in range(num_microbatches))


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Task]:
    """Yield 1F1B: the order of PACI, drained after all microbatches."""
    order = StageSchedule(stage, num_stages, num_microbatches).finite(num_microbatches)
    yield from (task for task in from_actions(order) if task.work is not Work.STEP)


def interleaved(
    stage: int, num_stages: int, num_microbatches: int, chunks: int
) -> Iterator[Task]:
    """Yield interleaved 1F1B as Megatron orders it: microbatches in groups of ``num_stages``.

    A group passes the stage's first chunk, then its second and so on; backwards take the chunks
    the other way round. ``num_stages`` has to divide ``num_microbatches``.
    """
    places = [
        (group + offset, chunk)
        for group in range(0, num_microbatches, num_stages)
        for chunk in range(chunks)
        for offset in range(num_stages)
    ]
    forwards = [Task(Work.FORWARD, index, chunk) for index, chunk in places]
    backwards = [Task(Work.BACKWARD, index, chunks - 1 - chunk) for index, chunk in places]
    ahead = min(len(places), 2 * (num_stages - stage - 1) + (chunks - 1) * num_stages)
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        yield from (forward, backward)
    yield from backwards[len(places) - ahead:]


def zero_bubble(num_microbatches: int, *, ahead: int, deferred: int) -> Iterator[Task]:
    """Yield a stage's order with split backwards, of which those of the weights are put off.

    Args:
        ahead: Forwards before the first backward.
        deferred: Backwards of weights that are still open when a stage has made the gradient of an
            input and one of weights. The last ones fill the time in which 1F1B drains.
    """
    yield from (Task(Work.FORWARD, index) for index in range(min(ahead, num_microbatches)))
    for index in range(num_microbatches):
        yield Task(Work.BACKWARD_INPUT, index)
        if index >= deferred:
            yield Task(Work.BACKWARD_WEIGHT, index - deferred)
        if index + ahead < num_microbatches:
            yield Task(Work.FORWARD, index + ahead)
    for index in range(max(0, num_microbatches - deferred), num_microbatches):
        yield Task(Work.BACKWARD_WEIGHT, index)


def zb_h1(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Task]:
    """Yield ZB-H1: the forwards of 1F1B; every stage keeps what the first one has to keep."""
    return zero_bubble(num_microbatches, ahead=num_stages - stage, deferred=stage)


def zb_h2(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Task]:
    """Yield ZB-H2: so many forwards ahead (2N - 1 on the first stage) that no stage ever waits."""
    return zero_bubble(
        num_microbatches, ahead=2 * (num_stages - stage) - 1, deferred=2 * stage
    )


def zbv(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Task]:
    """Yield ZB-V: two chunks per stage, the second ones in the opposite order of stages.

    The last stage passes its output on to itself, and the first one makes the loss. No stage waits
    from ``2 num_stages`` microbatches on, if the three passes take equally long. With fewer, what
    there is not is left out.
    """
    made = {(work, chunk): 0 for work in Work for chunk in (0, 1)}

    def make(work: Work, chunk: int) -> Iterator[Task]:
        index = made[work, chunk]
        if index < num_microbatches:
            made[work, chunk] += 1
            yield Task(work, index, chunk)

    def whole_backward(chunk: int) -> Iterator[Task]:
        yield from make(Work.BACKWARD_INPUT, chunk)
        yield from make(Work.BACKWARD_WEIGHT, chunk)

    # Until the first microbatch is back on its way through the second chunks ...
    for _ in range(2 * (num_stages - stage) - 1):
        yield from make(Work.FORWARD, 0)
    # ... and until its first gradient arrives: both chunks in turn.
    for _ in range(stage):
        yield from make(Work.FORWARD, 1)
        yield from make(Work.FORWARD, 0)
    # Gradients come every three passes, but none of the first chunk yet.
    for _ in range(num_stages - stage):
        yield from make(Work.FORWARD, 1)
        yield from whole_backward(1)
    while made[Work.FORWARD, 1] < num_microbatches:
        yield from make(Work.FORWARD, 0)
        yield from whole_backward(0)
        yield from make(Work.FORWARD, 1)
        yield from whole_backward(1)
    # The way back: gradients of inputs first, those of weights where there is time.
    for _ in range(stage):
        yield from make(Work.BACKWARD_INPUT, 0)
        yield from make(Work.BACKWARD_INPUT, 1)
    owed = [
        Task(Work.BACKWARD_WEIGHT, index, chunk)
        for chunk in (0, 1)
        for index in range(made[Work.BACKWARD_WEIGHT, chunk], made[Work.BACKWARD_INPUT, chunk])
    ]
    owed.sort(key=lambda task: task.index)
    while made[Work.BACKWARD_INPUT, 0] < num_microbatches:
        yield (task := next(make(Work.BACKWARD_INPUT, 0)))
        owed.append(Task(Work.BACKWARD_WEIGHT, task.index))
        yield owed.pop(0)
    yield from owed
