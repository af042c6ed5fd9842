"""Traces and telemetry of real runs: they change no number and say what happened."""

from __future__ import annotations

import json
import os
import struct
from collections import Counter

import pytest

from megatron_paci.schedule import StageSchedule
from megatron_paci.trace import on_one_clock, shares
from megatron_paci.trace_command import panel_of
from megatron_paci.trace_file import read_traces
from tests.gloo.launch import flags, launch

ITERATIONS, MICROBATCHES, WINDOW = 6, 8, 2
COMMON = f"--train-iters {ITERATIONS} --clip-grad 0.3 --eval-interval 4 --eval-iters 1"
PACI = f"{COMMON} --pipeline-schedule paci --paci-accum {WINDOW}"
INTERLEAVED = f"{COMMON} --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("observe")


@pytest.fixture(scope="module")
def two(folder):
    pytest.importorskip("wandb")
    def paci(name):
        return f"{PACI} --save-interval 5 --save {folder / name / 'checkpoints'}"

    writers = (
        f"--tensorboard-dir {folder / 'tensorboard'} --tensorboard-log-interval 2 "
        f"--wandb-project paci --wandb-exp-name test --wandb-save-dir {folder / 'wandb'}"
    )
    scenarios = {
        "plain": paci("plain"),
        "observed": f"{paci('observed')} --paci-trace {folder / 'paci'} {writers}",
        "1f1b": f"{COMMON} --pipeline-schedule 1f1b --paci-trace {folder / '1f1b'}",
        "1f1b-plain": f"{COMMON} --pipeline-schedule 1f1b",
        "interleaved": f"{INTERLEAVED} --paci-trace {folder / 'interleaved'}",
        "off": f"{paci('off')} --paci-telemetry off --tensorboard-dir {folder / 'none'}",
    }
    os.environ["WANDB_MODE"] = "offline"
    try:
        return launch(
            2, {name: {"arguments": flags(2, extra)} for name, extra in scenarios.items()},
            folder / "two", seconds=240, fresh=True,
        )
    finally:
        del os.environ["WANDB_MODE"]


@pytest.mark.parametrize("observed, plain", [("observed", "plain"), ("1f1b", "1f1b-plain"),
                                             ("off", "plain")])
def test_observing_changes_no_number(two, observed, plain):
    for one, other in zip(two[observed], two[plain], strict=True):
        assert one["weights"] == other["weights"] and one["optimizer"] == other["optimizer"]
        losses = [{name: value for name, value in entry.items() if not name.startswith("paci")}
                  for entry in one["losses"]]
        assert losses == other["losses"] and len(losses) == ITERATIONS


def test_a_trace_has_every_pass_with_its_drift(two, folder):
    for trace in read_traces(folder / "paci"):
        assert not trace.truncated
        count = Counter(span.kind for span in trace.spans)
        assert count["F"] == count["B"] == ITERATIONS * MICROBATCHES
        assert count["STEP"] == count["close"] == ITERATIONS * MICROBATCHES // WINDOW
        assert count["iteration"] == ITERATIONS
        assert count["evaluate"] == 1 and count["checkpoint"] == 1
        # It drains for the evaluation after iteration 4 and the checkpoint after 5.
        assert {span.facts["stream"] for span in trace.spans if span.kind == "B"} == {0, 1, 2}
        schedule = StageSchedule(trace.stage, 2, WINDOW)
        for span in trace.spans:
            if span.kind == "B":
                assert span.facts["drift"] == schedule.drift(span.facts["microbatch"])
        assert max(span.facts.get("drift", 0) for span in trace.spans) == 1 - trace.stage


def test_waits_and_sends_are_those_of_the_stage(two, folder):
    first, last = read_traces(folder / "paci")
    sent = [span.facts["message"] for span in first.spans if span.kind == "send"]
    taken = [span.facts["message"] for span in last.spans if span.kind == "wait"]
    assert [each for each in taken if each[0] == "F"] == sent
    assert len(sent) == ITERATIONS * MICROBATCHES and {each[0] for each in sent} == {"F"}
    size = 32 * 2 * 64 * 4  # sequence, microbatch, hidden, fp32
    assert {span.facts["bytes"] for span in first.spans if span.kind == "send"} == {size}
    assert {span.facts["message"][0] for span in last.spans if span.kind == "send"} == {"B"}


def test_no_message_comes_before_it_was_sent(two, folder):
    first, last = on_one_clock(read_traces(folder / "paci"))
    ends = {(s.kind, s.facts["stream"], s.facts["microbatch"]): s
            for s in first.spans if s.kind in ("F", "B")}
    for span in last.spans:
        if span.kind == "F":
            assert ends["F", span.facts["stream"], span.facts["microbatch"]].end <= span.begin
        elif span.kind == "B":
            assert span.end <= ends["B", span.facts["stream"], span.facts["microbatch"]].begin
    for trace in (first, last):
        assert shares(trace)["evaluate"] > 0 and shares(trace)["checkpoint"] > 0


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 2)])
def test_megatrons_own_schedules_leave_traces_too(two, folder, schedule, chunks):
    traces = read_traces(folder / schedule)
    for trace in traces:
        count = Counter(span.kind for span in trace.spans)
        assert count["F"] == count["B"] == ITERATIONS * MICROBATCHES * chunks
        assert count["STEP"] == ITERATIONS and count["wait"] > 0
        found = Counter(span.facts.get("chunk", 0) for span in trace.spans if span.kind == "B")
        assert set(found.values()) == {ITERATIONS * MICROBATCHES}
        assert sorted(found) == list(range(chunks))
    panel = panel_of(traces, 2, 3)
    assert (panel.num_stages, panel.num_microbatches) == (2, MICROBATCHES)


def test_the_log_gets_the_worst_stage(two):
    for entry in two["observed"][1]["losses"]:
        assert entry["paci drift"] == 1.0 and 0 <= entry["paci idle"] <= 1
    assert not any("paci drift" in entry for entry in two["off"][1]["losses"])
    assert two["observed"][0]["losses"][0] == {}


def expected(tag):
    """Return whether a written value is what it has to be in this run."""
    name, stage = tag.removeprefix("paci ").split("/stage ")
    first = stage == "0"
    return {
        "drift_max": lambda value: value == first,
        "drift_mean": lambda value: (0 < value < 1) if first else value == 0,
        "queue_depth": lambda value: value == 2 - int(stage),
        "idle_fraction": lambda value: 0 <= value <= 1,
        "clip_coefficient": lambda value: 0 < value < 1,
        "norm_lag": lambda value: value == 0 if first else value in (0, 1, 2),
        "skipped": lambda value: value == 0,
        "partial": lambda value: value == 0,
        "updates": lambda value: value % (MICROBATCHES // WINDOW) in (0, 3),
    }[name]


def test_tensorboard_has_the_figures_of_every_stage(two, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if "/stage " in tag]
    assert len(tags) == 2 * 9
    for tag in tags:
        scalars = events.Scalars(tag)
        assert [each.step for each in scalars] == list(range(2, ITERATIONS + 1, 2))
        assert all(expected(tag)(each.value) for each in scalars), (tag, scalars)
    assert "paci drift" in events.Tags()["scalars"]


def offline_records(path):
    """Yield the records of a run file: LevelDB's log format, blocks of 32 kiB, behind a header."""
    data, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:  # no room for the header of a piece: zeros to the end of the block
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7:position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def test_weights_and_biases_has_them_too(two, folder):
    from wandb.proto import wandb_internal_pb2

    [path] = (folder / "wandb").rglob("run-*.wandb")
    rows = []
    for data in offline_records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            })
    tags = {tag for row in rows for tag in row if "/stage " in tag}
    assert len(tags) == 2 * 9
    for tag in tags:
        values = [row[tag] for row in rows if tag in row]
        assert len(values) == ITERATIONS // 2 and all(map(expected(tag), values)), (tag, values)
