"""Traces: written, read, put on one clock, summed up and translated, made from simulated passes."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from megatron_paci.simulate.orders import Work
from megatron_paci.simulate.schedules import plan
from megatron_paci.simulate.timing import Costs, timeline
from megatron_paci.timeline import Span
from megatron_paci.trace import chrome_trace, on_one_clock, shares
from megatron_paci.trace_file import RankTrace, TraceError, TraceWriter, read_trace, read_traces


def header(stage=0, num_stages=2, started=1000.0):
    return {
        "rank": stage, "stage": stage, "num_stages": num_stages, "replica": 0,
        "schedule": "paci", "accumulation": 2, "started": started,
    }


def simulated(num_stages, microbatches, accumulation=2):
    """Return the traces of a pipeline with a forward of 1 s, a backward of 2 s, and all waits."""
    found = plan("paci", num_stages, microbatches, accumulation=accumulation)
    spans = [[] for _ in range(num_stages)]
    free = [0.0] * num_stages
    for event in timeline(found.orders, found.path, Costs.equal(num_stages)):
        if event.task.work is Work.STEP:
            continue
        kind, microbatch = event.task.work.value, event.task.index
        start, own = float(event.start), spans[event.stage]
        if start > free[event.stage]:
            own.append(Span("wait", free[event.stage], start, {"message": f"{kind}{microbatch}"}))
        facts = {"stream": 0, "microbatch": microbatch, "version": 0}
        own.append(Span(kind, start, float(event.end), facts))
        free[event.stage] = float(event.end)
    return [
        RankTrace(header(stage, num_stages), each, truncated=False)
        for stage, each in enumerate(spans)
    ]


def test_what_is_written_can_be_read(tmp_path):
    spans = [Span("F", 0.125, 0.25, {"microbatch": 3}), Span("wait", 0.25, 0.5, {"message": None})]
    writer = TraceWriter(tmp_path / "deep" / "folder", header())
    writer.write(spans)
    writer.close()
    [found] = [read_trace(tmp_path / "deep" / "folder" / "rank0.jsonl")]
    assert found == RankTrace(header(), spans, truncated=False)


def test_a_killed_run_leaves_what_it_has_written(tmp_path):
    writer = TraceWriter(tmp_path, header())
    writer.write([Span("F", 0.0, 1.0, {"microbatch": 0}), Span("B", 1.0, 2.0, {"microbatch": 0})])
    path = tmp_path / "rank0.jsonl"
    path.write_text(path.read_text()[:-20])  # the writer is still open, as in a killed process
    found = read_trace(path)
    assert [span.kind for span in found.spans] == ["F"] and found.truncated


def test_damage_and_what_is_no_trace_are_told(tmp_path):
    with pytest.raises(TraceError, match="--paci-trace"):
        read_traces(tmp_path)
    writer = TraceWriter(tmp_path, header())
    writer.write([Span("F", 0.0, 1.0), Span("B", 1.0, 2.0)])
    writer.close()
    with pytest.raises(TraceError, match="no trace of stage 1"):
        read_traces(tmp_path)
    path = tmp_path / "rank0.jsonl"
    first, second, third, _ = path.read_text().split("\n")
    path.write_text("\n".join([first, second[:10], third, ""]))
    with pytest.raises(TraceError, match="line 2 is damaged"):
        read_trace(path)
    path.write_text("{}\n")
    with pytest.raises(TraceError, match="is no trace"):
        read_trace(path)


@pytest.mark.parametrize("num_stages, microbatches", [(2, 2), (4, 4), (3, 7)])
def test_the_idle_time_of_1f1b_is_filling_and_draining_as_in_its_formula(num_stages, microbatches):
    for trace in simulated(num_stages, microbatches, accumulation=microbatches):
        found = shares(trace)
        busy = found["F"] + found["B"]
        assert (found["F"], found["B"]) == (microbatches, 2 * microbatches)
        # A trace ends with the stage's last pass, while those of the earlier stages go on.
        idle = Fraction(busy) * (num_stages - 1) / microbatches - 2 * trace.stage
        waits = found["fill"] + found["drain"] + found["input"] + found["gradient"]
        assert waits == idle
        assert found["other"] == 0


def test_a_filled_stream_waits_for_nothing():
    for trace in simulated(4, 40, accumulation=4):
        found = shares(trace)
        assert found["input"] == found["gradient"] == 0
        assert found["fill"] > 0 or trace.stage == 3


@pytest.mark.parametrize(
    "kind, message, cause",
    [("close", None, "step"), ("STEP", None, "step"), ("wait", "F9", "input"),
     ("wait", "B9", "gradient"), ("wait", "R", "report"), ("wait", None, "message"),
     ("settle", None, "settle"), ("evaluate", None, "evaluate"),
     ("checkpoint", None, "checkpoint")],
)
def test_every_span_has_a_cause(kind, message, cause):
    passes = [Span("F", 0, 1, {"stream": 0}), Span("B", 1, 2, {"stream": 0})]
    later = [Span("F", 7, 8, {"stream": 0}), Span("B", 8, 9, {"stream": 0})]
    trace = RankTrace(header(), [*passes, Span(kind, 2, 5, {"message": message}), *later], False)
    found = shares(trace)
    assert found.pop("F") == found.pop("B") == 2
    assert found.pop(cause) == 3 and found.pop("other") == 2
    assert set(found.values()) == {0.0}


def test_only_a_stretch_of_time_is_summed_up():
    [first, *_] = simulated(2, 4)
    whole = shares(first)
    for parts in (((0.0, 4.5), (4.5, 99.0)), ((-9.0, 3.0), (3.0, 3.5), (3.5, 99.0))):
        found = [shares(first, since=since, until=until) for since, until in parts]
        assert all(each != whole for each in found)
        assert {name: sum(each[name] for each in found) for name in whole} == whole
    # The first forward, 0 s to 1 s, from its middle on, and no longer than to there.
    assert shares(first, since=0.5)["F"] == whole["F"] - 0.5
    assert shares(first, until=0.5)["F"] == 0.5


def test_a_wait_belongs_to_the_stream_of_the_pass_that_it_precedes():
    def passes(begin, stream):
        return [Span("F", begin, begin + 1, {"stream": stream}),
                Span("B", begin + 1, begin + 2, {"stream": stream})]

    between = Span("wait", 3, 5, {"message": "F0"})
    # A report is waited for behind the last backward, in a drain before the next stream begins.
    reports = [Span("wait", 2, 3, {"message": "R"}), Span("wait", 7, 8, {"message": "R"})]
    spans = [*passes(0, 0), reports[0], between, *passes(5, 1), reports[1]]
    found = shares(RankTrace(header(), spans, False))
    assert (found["fill"], found["drain"]) == (2, 2)
    before_backward = Span("wait", 6, 8, {"message": "B0"})
    spans = [*passes(0, 0), passes(5, 1)[0], before_backward, Span("B", 8, 9, {"stream": 1})]
    assert shares(RankTrace(header(), spans, False))["fill"] == 2


def test_clocks_of_other_hosts_are_set_by_the_messages():
    traces = simulated(3, 6)
    truth = [span.begin for span in traces[2].spans]
    # Each host's wall clock is off; the spans count from their own start.
    wrong = [
        RankTrace({**trace.header, "started": 1000.0 + off}, trace.spans, False)
        for trace, off in zip(traces, (0.0, -50.0, 80.0))
    ]
    found = on_one_clock(wrong)
    assert [span.begin for span in found[0].spans] == [span.begin for span in traces[0].spans]
    for upper, lower in zip(found, found[1:]):
        ends = {(s.kind, s.facts["microbatch"]): s for s in lower.spans if s.kind != "wait"}
        for span in upper.spans:
            if span.kind == "F":
                assert span.end <= ends["F", span.facts["microbatch"]].begin + 1e-9
            elif span.kind == "B":
                assert ends["B", span.facts["microbatch"]].end <= span.begin + 1e-9
    assert [span.begin for span in found[2].spans] == pytest.approx(truth, abs=2.0)


def test_clocks_count_from_when_each_rank_started():
    [trace] = simulated(1, 2)
    replicas = [
        RankTrace({**trace.header, "rank": rank, "replica": rank, "started": started},
                  trace.spans, False)
        for rank, started in enumerate((1003.0, 1000.0))
    ]
    late, first = on_one_clock(replicas)
    assert [span.begin for span in first.spans] == [span.begin for span in trace.spans]
    assert [span.begin - 3.0 for span in late.spans] == [span.begin for span in trace.spans]


@pytest.mark.parametrize("fact, other", [("stream", 1), ("chunk", 1)])
def test_passes_of_another_stream_or_chunk_are_other_messages(fact, other):
    facts = {"stream": 0, "chunk": 0, "microbatch": 0}
    upper = [Span("F", 0.0, 1.0, facts), Span("F", 9.0, 10.0, {**facts, fact: other})]
    lower = [Span("F", 1.0, 2.0, facts), Span("F", 10.0, 11.0, {**facts, fact: other})]
    traces = [RankTrace(header(stage), spans, False) for stage, spans in enumerate((upper, lower))]
    assert [each.spans for each in on_one_clock(traces)] == [upper, lower]
    arrows = [event for event in chrome_trace(traces)["traceEvents"] if event["ph"] in "sf"]
    assert [event["ts"] for event in arrows] == [0.0, 1e6, 9e6, 10e6]


def test_clocks_that_agree_are_left_alone():
    traces = simulated(3, 6)
    for found, trace in zip(on_one_clock(traces), traces):
        assert found.spans == trace.spans


def test_the_format_of_chrome():
    traces = simulated(2, 4)
    traces[0].spans[-1].facts["version"] = 1
    traces[1].spans.append(Span("send", 20.0, 20.0, {"message": "B3", "bytes": 8}))
    found = json.loads(json.dumps(chrome_trace(traces)))["traceEvents"]
    by_phase = {}
    for event in found:
        by_phase.setdefault(event["ph"], []).append(event)
    names = [event["args"]["name"] for event in by_phase["M"] if event["name"] == "process_name"]
    assert names == ["stage 0, rank 0", "stage 1, rank 1"]
    slices = by_phase["X"]
    assert sum(event["cat"] in "FB" for event in slices) == 16
    first = next(event for event in slices if event["pid"] == 1 and event["name"] == "F0")
    assert (first["ts"], first["dur"]) == (1e6, 1e6)
    # Every message is an arrow between two slices: 4 activations, 4 gradients.
    starts = {event["id"]: event for event in by_phase["s"]}
    ends = {event["id"]: event for event in by_phase["f"]}
    assert starts.keys() == ends.keys() and len(starts) == 8
    for number, start in starts.items():
        end = ends[number]
        assert {start["pid"], end["pid"]} == {0, 1} and start["ts"] < end["ts"]
        for each in (start, end):
            assert any(
                event["ts"] <= each["ts"] < event["ts"] + event["dur"]
                for event in slices if event["pid"] == each["pid"]
            )
    in_flight = [event["args"]["in flight"] for event in by_phase["C"]
                 if event["name"] == "in flight" and event["pid"] == 0]
    assert max(in_flight) == 2 and in_flight[-1] == 0
    assert [event["name"] for event in by_phase["i"]] == ["send B3"]
    versions = [(event["ts"], event["args"]["version"]) for event in by_phase["C"]
                if event["name"] == "version" and event["pid"] == 0]
    assert versions == [(0.0, 0), (traces[0].spans[-1].begin * 1e6, 1)]
