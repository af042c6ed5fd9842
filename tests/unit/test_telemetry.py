"""The figures of a stage, and the share of idle time in an iteration, from spans."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from megatron_paci.telemetry import IdleTime, StageFigures, Telemetry
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


def test_the_figures_of_a_stage_are_those_of_its_last_iteration():
    engine = SimpleNamespace(
        version=7, drift_counts=Counter({0: 4, 1: 12}), in_flight_max=3,
        schedule=SimpleNamespace(stage=0),
    )
    window = SimpleNamespace(
        clip_coefficient=0.25, skipped=2, partial=1,
        ledger=SimpleNamespace(newest=SimpleNamespace(window=4)),
    )
    groups = SimpleNamespace(telemetry_from_previous=None, telemetry_to_next=None)
    telemetry = Telemetry(groups, None, engine, window)
    telemetry.idle.fraction = 0.5
    telemetry.end_run()
    telemetry.end_drain()
    expected = StageFigures(
        updates=7, drift_max=1, drift_mean=0.75, queue_depth=3, idle_fraction=0.5,
        clip_coefficient=0.25, norm_lag=2, skipped=2, partial=1,
    )
    assert telemetry.stages == [expected]
    # The drift is that of the microbatches since.
    engine.drift_counts += Counter({0: 2, 2: 2})
    telemetry.end_run()
    assert (telemetry.stages[0].drift_max, telemetry.stages[0].drift_mean) == (2, 1.0)
    window.ledger.newest = None
    telemetry.end_run()
    figures = telemetry.stages[0]
    assert (figures.drift_max, figures.drift_mean, figures.norm_lag) == (0, 0, 0)
