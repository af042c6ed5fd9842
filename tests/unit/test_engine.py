"""The engine with mock stages in one process."""

from collections import deque

import pytest

from megatron_paci.engine import Engine
from megatron_paci.schedule import StageSchedule


class MockStage:
    """Compute, channel and window of one stage that only write down what is asked of them."""

    def __init__(self):
        self.log = []
        self.first_marks = []
        self.expected = 0
        self.in_step = None

    def forward(self, microbatch, input_tensor, first_of_version):
        self.log.append(f"forward {microbatch} {input_tensor}")
        self.first_marks.append(first_of_version)
        return f"out{microbatch}"

    def backward(self, input_tensor, output_tensor, output_grad):
        self.log.append(f"backward {input_tensor} {output_tensor} {output_grad}")
        return f"grad-of-{input_tensor}"

    def release(self, output_tensor):
        self.log.append(f"release {output_tensor}")

    def begin_stream(self, schedule):
        self.log.append(f"begin a={schedule.accumulation}")

    def expect_forwards(self, count):
        self.expected += count

    def receive_forward(self, microbatch, with_report):
        return f"in{microbatch}"

    def send_forward(self, microbatch, output_tensor):
        self.log.append(f"send {output_tensor}")

    def receive_backward(self, microbatch, with_report):
        return f"grad{microbatch}"

    def send_backward(self, microbatch, input_grad):
        self.log.append(f"return {input_grad}")

    def receive_downstream(self):
        return "earlier"

    def send_downstream(self, report):
        self.log.append(f"send {report}")

    def receive_upstream(self):
        return "later"

    def send_upstream(self, report):
        self.log.append(f"return {report}")

    def finish(self):
        self.log.append("finish")

    def prepare(self, last):
        self.log.append(f"prepare {'last' if last else 'more'}")

    def gather_weights(self):
        self.log.append("gather")

    def close(self, window, later):
        self.log.append(f"close {window} {later}")
        return f"report{window}"

    def step(self):
        if self.in_step:
            raise self.in_step
        self.log.append("step")

    def hear(self, earlier):
        self.log.append(f"hear {earlier}")

    def tell(self, window):
        return f"report{window}"

    def settle(self):
        self.log.append("settle")


def build(stage=0, num_stages=2, accumulation=2, *variant):
    mock = MockStage()
    actions = []
    engine = Engine(
        StageSchedule(stage, num_stages, accumulation, *variant),
        compute=mock, channel=mock, window=mock,
        observer=lambda engine, action: actions.append(str(action)),
    )
    return engine, mock, actions


def test_runs_continue_the_stream_and_a_drain_begins_a_new_one():
    engine, mock, actions = build(stage=0, num_stages=3, accumulation=2)
    engine.run(2)
    assert " ".join(actions) == "F0 F1"
    engine.run(2)
    assert " ".join(actions[2:]) == "F2 B0 F3 B1 STEP"
    engine.drain()
    assert " ".join(actions[7:]) == "B2 B3 STEP"
    engine.drain()
    assert len(actions) == 10
    engine.run(2)
    assert " ".join(actions[10:]) == "F0 F1"
    assert (engine.version, engine.num_forwards, engine.num_backwards) == (2, 6, 4)
    assert mock.expected == 6


def test_a_deferred_step_waits_for_the_next_run_or_the_drain():
    engine, mock, actions = build(1, 2, 2, 0, True)
    engine.run(2)
    assert " ".join(actions) == "F0 B0 F1 B1" and engine.version == 0
    engine.run(2)
    assert " ".join(actions[4:]) == "F2 STEP B2 F3 B3" and engine.version == 1
    assert mock.first_marks == [True, False, False, True]  # F2 still has the weights of F0
    engine.drain()
    assert " ".join(actions[9:]) == "STEP" and engine.version == 2 and not engine.streaming
    engine.drain()
    assert len(actions) == 10
    first, _, done = build(0, 2, 1, 0, True)
    first.run(2)
    first.drain()
    assert " ".join(done) == "F0 F1 B0 STEP B1 STEP"
    # Backwards that no forward with the same weights has preceded: all but the first.
    gathering, mock, _ = build(1, 2, 1, 0, True)
    gathering.run(3)
    assert mock.log.count("gather") == 2


def test_a_change_of_the_accumulation_keeps_the_variation():
    engine, _, actions = build(0, 2, 2, 1, True)
    engine.run(4)
    engine.set_accumulation(1)
    assert engine.schedule == StageSchedule(0, 2, 1, 1, True)
    engine.run(4)
    assert " ".join(actions[-7:]) == "F0 F1 F2 B0 F3 STEP B1"
    assert engine.statistics()["in_flight_max"] == 3 == engine.statistics()["in_flight_bound"]


def test_passes_get_what_belongs_to_their_microbatch():
    engine, mock, _ = build(stage=0, num_stages=2, accumulation=2)
    engine.run(2)
    assert mock.log == [
        "begin a=2", "begin a=2", "forward 0 in0", "send out0", "release out0",
        "forward 1 in1", "send out1", "release out1",
        "prepare more", "backward in0 out0 grad0", "return grad-of-in0",
    ]
    engine.drain()
    assert mock.log[11:] == [
        "prepare last", "backward in1 out1 grad1", "return grad-of-in1",
        "close 0 later", "return report0", "step", "settle", "finish", "begin a=2", "begin a=2",
    ]


def test_reports_travel_behind_the_forwards_that_the_rule_names():
    engine, mock, actions = build(stage=0, num_stages=2, accumulation=2)
    for _ in range(4):
        engine.run(2)
    heard = [i for i, entry in enumerate(mock.log) if entry.startswith("hear")]
    assert [mock.log[i + 1].split()[1] for i in heard] == ["3", "5", "7"]
    assert [mock.log[i + 3] for i in heard] == ["send report0", "send report1", "send report2"]
    engine.drain()
    before = len(mock.log)
    engine.run(2)
    engine.run(2)
    # A new stream: windows go on being counted, the rule begins anew.
    assert "close 4 later" in mock.log[before:] and "send report4" in mock.log[before:]


def test_weights_are_gathered_before_a_backward_that_no_forward_with_them_precedes():
    engine, mock, actions = build(stage=0, num_stages=3, accumulation=1)
    engine.run(4)
    assert "gather" not in mock.log and actions[-1] == "STEP"
    engine.drain()
    assert mock.log.count("gather") == 2  # both backwards of the drain follow a step
    first = mock.log.index("gather")
    assert mock.log[first - 1].startswith("prepare") and mock.log[first + 1].startswith("backward")


def test_streaming_is_the_same_on_all_stages_between_drains():
    for stage in range(3):
        engine, _, _ = build(stage, 3, 2)
        assert not engine.streaming
        engine.run(4)
        assert engine.streaming
        engine.drain()
        assert not engine.streaming


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_counters_equal_the_closed_forms(num_stages, accumulation):
    for stage in range(num_stages):
        engine, _, _ = build(stage, num_stages, accumulation)
        for _ in range(5):
            engine.run(4)
        engine.drain()
        drifts = deque(engine.schedule.drift(j) for j in range(20))
        assert engine.drift_counts == {d: drifts.count(d) for d in set(drifts)}
        statistics = engine.statistics()
        assert statistics["drift_max"] == max(drifts) <= statistics["drift_bound"]
        assert statistics["in_flight_max"] == num_stages - stage == statistics["in_flight_bound"]
        assert statistics["updates"] == 20 // accumulation


def test_the_first_forward_after_each_update_is_marked_not_the_first_of_each_iteration():
    engine, mock, _ = build(stage=1, num_stages=2, accumulation=2)
    for _ in range(3):
        engine.run(4)
    assert mock.first_marks == [True, False] * 6


def test_changing_the_accumulation_drains_first():
    engine, _, actions = build(stage=0, num_stages=2, accumulation=2)
    engine.run(4)
    engine.set_accumulation(2)
    assert actions[-1] == "B2"
    engine.set_accumulation(4)
    assert actions[-2:] == ["B3", "STEP"]
    engine.run(4)
    assert actions[-1] == "B2" and engine.version == 2


def test_a_run_that_would_end_inside_a_window_is_refused_before_anything_moves():
    engine, mock, _ = build(accumulation=4)
    with pytest.raises(ValueError, match="6 microbatches are not a multiple"):
        engine.run(6)
    assert mock.log == ["begin a=4"] * 2 and not mock.expected


def test_after_an_error_the_engine_says_where_in_the_schedule_it_happened():
    engine, mock, _ = build(stage=0, num_stages=2, accumulation=2)
    mock.in_step = RuntimeError("out of memory")
    assert not engine.interrupted
    with pytest.raises(RuntimeError):
        engine.run(4)
    place = engine.describe()
    assert "stage 0 of 2" in place and "in action STEP" in place
    assert "in flight [2@v0]" in place and "last actions F0 F1 B0 F2 B1" in place
    assert engine.interrupted


def test_a_closed_engine_holds_nothing_and_does_not_run():
    engine, _, actions = build()
    engine.run(2)
    engine.close()
    assert not engine.in_flight
    engine.run(2)
    assert actions == ["F0", "F1", "B0"]
