"""Times orders of actions, from the same data that the engine runs.

A pass starts as soon as its stage is free and its input is there; a message takes ``latency``, a
step no time. Times are in units of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_paci.schedule import STEP, Action, Kind


@dataclass(frozen=True)
class Pass:
    """One forward or backward pass on the time line."""

    stage: int
    start: float
    end: float
    stream: int
    """Index of the stream between two drains that it belongs to."""
    action: Action


def simulate(
    streams: Sequence[Sequence[Sequence[Action]]],
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    latency: float = 0.0,
) -> list[Pass]:
    """Return every pass, in the order in which stages take them.

    Args:
        streams: For each stage its streams, one after another, each ended by a drain.

    Raises:
        ValueError: The orders wait for each other.
    """
    orders = [
        [(number, action) for number, stream in enumerate(stage) for action in stream
         if action is not STEP]
        for stage in streams
    ]
    length = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    free = [0.0] * len(orders)
    position = [0] * len(orders)
    ends: dict[tuple[int, int, Action], float] = {}
    passes: list[Pass] = []
    while any(position[stage] < len(order) for stage, order in enumerate(orders)):
        before = len(passes)
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                stream, action = order[position[stage]]
                source = stage + (1 if action.kind is Kind.BACKWARD else -1)
                arrival = 0.0
                if 0 <= source < len(orders):
                    if (source, stream, action) not in ends:
                        break
                    arrival = ends[source, stream, action] + latency
                start = max(free[stage], arrival)
                free[stage] = ends[stage, stream, action] = start + length[action.kind]
                passes.append(Pass(stage, start, free[stage], stream, action))
                position[stage] += 1
        if len(passes) == before:
            raise ValueError("the orders of the stages wait for each other")
    return passes


def utilization(passes: Sequence[Pass], stage: int, *, since: int, until: int) -> float:
    """Return the busy share of ``stage`` from the start of forward ``since`` to that of ``until``.

    Args:
        since: Microbatch of a stream that has filled by then.
        until: A later one, before the stream drains.
    """
    own = [item for item in passes if item.stage == stage]
    begin, end = (
        next(item.start for item in own if item.action == Action(Kind.FORWARD, microbatch))
        for microbatch in (since, until)
    )
    busy = sum(item.end - item.start for item in own if begin <= item.start < end)
    return busy / (end - begin)
