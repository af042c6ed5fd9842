"""The share of idle time in an iteration, from spans."""

from __future__ import annotations

from megatron_paci.telemetry import IdleTime
from megatron_paci.timeline import Span


def test_waiting_is_a_share_of_the_time_between_the_ends_of_two_iterations():
    idle = IdleTime()
    assert idle.fraction == 0.0
    idle.add([Span("F", 0, 4), Span("wait", 4, 6), Span("B", 6, 9), Span("settle", 9, 10)])
    assert idle.fraction == 0.0  # the iteration has not ended
    idle.add([Span("iteration", 12, 12), Span("wait", 12, 13)])
    assert idle.fraction == 3 / 12
    idle.add([Span("B", 13, 16), Span("iteration", 16, 16)])
    assert idle.fraction == 1 / 4
    idle.add([Span("F", 16, 20), Span("iteration", 20, 20)])
    assert idle.fraction == 0.0
