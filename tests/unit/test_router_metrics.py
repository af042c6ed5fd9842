"""Router metrics, passed on along a pipeline of stages in one process."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import moe_logging

from megatron_paci.groups import StageGroups
from megatron_paci.router_metrics import METRICS, RouterMetrics

LAYERS = 4
NAME = "load_balancing_loss"


class QueueLink:
    """Both ends of a link."""

    def __init__(self):
        self.sent: deque = deque()

    def send(self, index, tensor):
        self.sent.append(tensor)

    def post_receive(self, shape):
        assert shape == (len(METRICS), LAYERS)

    def take(self):
        return self.sent.popleft()

    def release_sent(self, arrived):
        pass

    def finish(self):
        pass


@pytest.fixture
def stages():
    """Two stages, each with a tracker of its own."""
    config = SimpleNamespace(num_layers=LAYERS, mtp_num_layers=None)
    link = QueueLink()
    first = RouterMetrics(StageGroups(alone=None), config)
    last = RouterMetrics(StageGroups(alone=None), config)
    first._out = last._in = link
    before = moe_logging.get_moe_metrics_tracker()
    yield [(first, moe_logging.MoEMetricsTracker()), (last, moe_logging.MoEMetricsTracker())]
    moe_logging.set_moe_metrics_tracker(before)


def on(stage):
    metrics, tracker = stage
    moe_logging.set_moe_metrics_tracker(tracker)
    return metrics, tracker


def record(stage, layer, value):
    _, tracker = on(stage)
    tracker.record(NAME, torch.tensor(value), layer, LAYERS)


def logged_run(stages) -> list[float]:
    """End a run on both stages and return what the last one logs, which clears its tracker."""
    for stage in stages:
        metrics, tracker = on(stage)
        metrics.end_run()
    values = tracker.metrics[NAME].values.tolist()
    tracker.clear()
    return values


def test_the_last_stage_has_the_metrics_of_all_layers(stages):
    for value in (1.0, 2.0):
        record(stages[0], 1, value)
        record(stages[1], 4, 10 * value)
    assert logged_run(stages) == [3.0, 0.0, 0.0, 30.0]
    record(stages[1], 4, 5.0)
    assert logged_run(stages) == [0.0, 0.0, 0.0, 5.0]  # nothing counts twice


def test_what_a_drain_recomputes_counts_in_the_next_run(stages):
    record(stages[0], 1, 1.0)
    assert logged_run(stages) == [1.0, 0.0, 0.0, 0.0]
    record(stages[0], 1, 2.0)  # recomputed in the drain
    for stage in stages:
        metrics, tracker = on(stage)
        metrics.end_drain()
        tracker.clear()  # as Megatron does after an evaluation
    record(stages[0], 1, 4.0)
    assert logged_run(stages) == [6.0, 0.0, 0.0, 0.0]
