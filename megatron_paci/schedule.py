"""The PACI order as data: what one pipeline stage does, in which sequence.

Pure Python: the engine executes these actions, the simulator times them and the tests enumerate
them, so the rule exists once. The rule is 1F1B without an end (arXiv 2606.07881): stage ``i`` of
``N`` admits a forward pass while fewer than ``N - i`` microbatches are in flight, runs the oldest
backward pass otherwise, and takes one optimizer step of its own after every ``accumulation``
backward passes. Microbatches are numbered from 0 at the start of the stream, which begins anew
after each drain.

Two variations, both off by default: more microbatches in flight, so many for each link between a
stage and the last one, and a step that waits until one more forward has run.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count, islice
from typing import NamedTuple


class Kind(enum.Enum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"
    STEP = "STEP"


class Action(NamedTuple):
    """One unit of a stage's work. ``str(action)`` is ``F3``, ``B0`` or ``STEP``.

    A tuple, since two are made for every microbatch that is trained.
    """

    kind: Kind
    microbatch: int | None = None
    """Index in the stream since the last drain; None for a step, and for a step alone."""

    def __str__(self) -> str:
        return self.kind.value if self.microbatch is None else f"{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Inverse of ``str``.

        Raises:
            ValueError: ``text`` is not the text form of an action.
        """
        match = re.fullmatch(r"(?:([FB])(\d+)|STEP)", text, re.ASCII)
        if match is None:
            raise ValueError(f"{text!r} is not an action; expected e.g. 'F3', 'B0' or 'STEP'")
        return STEP if match[1] is None else cls(Kind(match[1]), int(match[2]))


STEP = Action(Kind.STEP)


@dataclass(frozen=True)
class StageSchedule:
    """The endless order of one stage, and the closed forms that follow from it."""

    stage: int
    """Position in the pipeline, 0 for the stage that reads the tokens."""

    num_stages: int
    """Pipeline size N."""

    accumulation: int
    """Backward passes per optimizer step, ``a``: the length of a window."""

    extra_in_flight: int = 0
    """More microbatches in flight than the paper's throttle has, for each link to the last stage:
    ``s``. The round trip of messages over a link hides behind them."""

    defer_step: bool = False
    """Whether a step comes only after the forward that follows the window's last backward, right
    before the next backward, so that gradients can be reduced during that forward."""

    def __post_init__(self) -> None:
        if not 0 <= self.stage < self.num_stages:
            raise ValueError(f"stage {self.stage} is not one of {self.num_stages} stages")
        if self.accumulation < 1:
            raise ValueError(f"accumulation must be at least 1, got {self.accumulation}")
        if self.extra_in_flight < 0:
            raise ValueError(f"extra_in_flight must be at least 0, got {self.extra_in_flight}")

    def depth_of(self, stage: int) -> int:
        """Return the most microbatches in flight on ``stage``: ``N - i + s (N - 1 - i)``."""
        return 1 + (self.num_stages - 1 - stage) * (1 + self.extra_in_flight)

    @cached_property
    def depth(self) -> int:
        """Most microbatches in flight on this stage."""
        return self.depth_of(self.stage)

    def ticks(self) -> Iterator[tuple[Action, ...]]:
        """Yield the endless order in ticks: a forward and what follows before the next forward."""
        ahead = self.depth - 1
        for microbatch in count():
            forward = Action(Kind.FORWARD, microbatch)
            if microbatch < ahead:
                yield (forward,)
            else:
                yield (forward,) + self._backward(microbatch - ahead)

    def drain(self, num_forwards: int) -> Iterator[Action]:
        """Yield what remains after ``num_forwards`` ticks when no further forward follows."""
        for microbatch in range(max(0, num_forwards - self.depth + 1), num_forwards):
            yield from self._backward(microbatch)
        if self.defer_step and num_forwards and self.ends_window(num_forwards - 1):
            yield STEP

    def finite(self, num_microbatches: int) -> Iterator[Action]:
        """Yield the order of a stream of ``num_microbatches`` that is then drained."""
        yield from chain.from_iterable(islice(self.ticks(), num_microbatches))
        yield from self.drain(num_microbatches)

    def ends_window(self, microbatch: int) -> bool:
        """Whether the backward of ``microbatch`` is the last one before a step."""
        return (microbatch + 1) % self.accumulation == 0

    def reported_window(self, microbatch: int) -> int | None:
        """Return the window whose report travels downstream with the forward of ``microbatch``.

        That is the first forward which the first stage makes after its step of that window, so
        all stages have taken the step by then, and know the rule without being told. None for
        forwards that carry no report.
        """
        stepped = microbatch - self._lead_of_first_stage
        if stepped < self.accumulation or stepped % self.accumulation:
            return None
        return stepped // self.accumulation - 1

    def _lead(self, stage: int) -> int:
        """Return how many microbatches a step of ``stage`` is behind the forward that follows it.

        With ``defer_step`` one more: a window's last backward may come right before that forward,
        and its step only after it.
        """
        return self.depth_of(stage) - 1 + self.defer_step

    @cached_property
    def _lead_of_first_stage(self) -> int:
        return self._lead(0)

    @property
    def report_lag(self) -> int:
        """Windows by which the newest downstream report is behind the window of a step.

        ``ceil((depth of the first stage - depth + 1) / accumulation)`` once the stream has filled,
        which is ``ceil((stage + 1) / accumulation)`` with the paper's throttle.
        """
        return -(-(self.depth_of(0) - self.depth + 1) // self.accumulation)

    def _backward(self, microbatch: int) -> tuple[Action, ...]:
        backward = Action(Kind.BACKWARD, microbatch)
        if self.defer_step:
            ready = microbatch > 0 and self.ends_window(microbatch - 1)
            return (STEP, backward) if ready else (backward,)
        return (backward, STEP) if self.ends_window(microbatch) else (backward,)

    def _stepped_at_forward(self, microbatch: int, stage: int) -> int:
        """Return how many backwards a step of ``stage`` before this forward may cover."""
        return max(0, microbatch - self._lead(stage))

    def version_at_forward(self, microbatch: int, stage: int | None = None) -> int:
        """Return the steps that this stage, or ``stage``, takes before its forward of a microbatch.

        Counted from the start of the stream.
        """
        stage = self.stage if stage is None else stage
        return self._stepped_at_forward(microbatch, stage) // self.accumulation

    def drift(self, microbatch: int) -> int:
        """Steps this stage takes between the forward and the backward of ``microbatch``."""
        return microbatch // self.accumulation - self.version_at_forward(microbatch)

    @property
    def drift_bound(self) -> int:
        """Largest drift of any microbatch on this stage.

        ``ceil((depth - 1) / accumulation)``, and ``ceil(depth / accumulation)`` with
        ``defer_step``.
        """
        return -(-self._lead(self.stage) // self.accumulation)


class ScheduleError(ValueError):
    """A set of orders breaks a rule; the message holds the grid up to the fault."""


def validate(
    orders: Sequence[Sequence[Action]],
    accumulation: int,
    num_microbatches: int,
    *,
    extra_in_flight: int = 0,
    defer_step: bool = False,
) -> str:
    """Check the finite orders of all stages against the rules and return their grid.

    Every action takes one time slot (a step takes none) and starts as soon as what it needs is
    there: forwards need the previous stage's forward, backwards the next stage's backward.

    Args:
        orders: One sequence of actions per stage, first stage first.
        accumulation: Backward passes per step that every stage must keep.
        num_microbatches: Microbatches that every stage must forward and backward exactly once.
        extra_in_flight: As in ``StageSchedule``.
        defer_step: Likewise: a step then comes right after a forward, or when there is none left.

    Returns:
        The grid as text: one row per stage, one column per time slot.

    Raises:
        ScheduleError: An order deadlocks, exceeds the throttle, steps off its window boundary,
            or misses, repeats or reorders a microbatch. The message marks the place with ``!``.
    """
    num_stages = len(orders)
    rule = StageSchedule(0, num_stages, accumulation, extra_in_flight, defer_step)
    position = [0] * num_stages
    cells: list[list[str]] = [[] for _ in orders]
    finished: dict[tuple[int, Action], int] = {}
    done = [{Kind.FORWARD: 0, Kind.BACKWARD: 0, Kind.STEP: 0} for _ in orders]

    def fail(stage: int, action: Action | None, reason: str) -> None:
        cells[stage].append(f"!{action}" if action else "!")
        where = f"stage {stage}" + (f", {action}" if action else "")
        raise ScheduleError(f"{where}: {reason}\n{format_grid(cells)}")

    def check(stage: int, action: Action) -> None:
        counts = done[stage]
        before = orders[stage][position[stage] - 1]
        if action.kind is Kind.STEP:
            if counts[Kind.BACKWARD] != (counts[Kind.STEP] + 1) * accumulation:
                fail(stage, action, f"step after {counts[Kind.BACKWARD]} backwards, not at the "
                                    f"end of a window of {accumulation}")
            if defer_step and before.kind is Kind.BACKWARD and (
                counts[Kind.FORWARD] < num_microbatches
            ):
                fail(stage, action, "a deferred step comes after the next forward")
            return
        full = counts[Kind.BACKWARD] == (counts[Kind.STEP] + 1) * accumulation
        waits = defer_step and action.kind is Kind.FORWARD and before.kind is Kind.BACKWARD
        if full and not waits:
            fail(stage, action, "the window is full but no step was taken")
        if action.microbatch != counts[action.kind]:
            fail(stage, action, f"expected microbatch {counts[action.kind]}")
        if action.kind is Kind.FORWARD:
            in_flight = counts[Kind.FORWARD] - counts[Kind.BACKWARD]
            if in_flight >= rule.depth_of(stage):
                fail(stage, action, f"{in_flight} microbatches are in flight already, the "
                                    f"throttle allows {rule.depth_of(stage)}")
        elif action.microbatch >= counts[Kind.FORWARD]:
            fail(stage, action, "backward before its forward")

    def ready_at(stage: int, action: Action, slot: int) -> bool:
        if action.kind is Kind.STEP:
            return True
        source = stage + (1 if action.kind is Kind.BACKWARD else -1)
        if not 0 <= source < num_stages:
            return True
        return finished.get((source, action), slot) < slot

    for slot in count():
        moved = False
        waiting = []
        for stage, order in enumerate(orders):
            cell = ""
            while position[stage] < len(order):
                action = order[position[stage]]
                if action.kind is not Kind.STEP and (cell or not ready_at(stage, action, slot)):
                    waiting.append((stage, action))
                    break
                check(stage, action)
                done[stage][action.kind] += 1
                position[stage] += 1
                moved = True
                if action.kind is not Kind.STEP:
                    finished[stage, action] = slot
                    cell = str(action)
                elif cell:
                    cell += "*"
            cells[stage].append(cell)
        if not moved:
            if waiting:
                fail(*waiting[0], "deadlock: what it needs never comes")
            break
    for stage, counts in enumerate(done):
        if counts[Kind.FORWARD] != num_microbatches or counts[Kind.BACKWARD] != num_microbatches:
            fail(stage, None, f"{counts[Kind.FORWARD]} forwards and {counts[Kind.BACKWARD]} "
                              f"backwards, expected {num_microbatches} of each")
        if counts[Kind.STEP] != num_microbatches // accumulation:
            fail(stage, None, f"{counts[Kind.STEP]} steps, expected "
                              f"{num_microbatches // accumulation}")
    return format_grid(cells)


def format_grid(cells: Sequence[Sequence[str]]) -> str:
    """Return rows of time slots as text, one row per stage; ``*`` marks a step after an action."""
    width = max((len(cell) for row in cells for cell in row), default=0)
    return "\n".join(
        f"stage {stage} | " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for stage, row in enumerate(cells)
    )
