"""What the traces of all ranks say together: one clock, Chrome's format, and where time went.

Pure: no torch. A trace comes from ``--paci-trace DIR`` (trace_file.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_paci.timeline import Span
from megatron_paci.trace_file import RankTrace

CAUSES = {
    "F": "forward",
    "B": "backward",
    "step": "update",
    "fill": "idle: pipeline filling",
    "drain": "idle: pipeline draining",
    "input": "idle: waiting for an input",
    "gradient": "idle: waiting for a gradient",
    "report": "idle: waiting for a report",
    "message": "idle: waiting for a message",
    "settle": "idle: meeting at a drain",
    "evaluate": "evaluation",
    "checkpoint": "checkpoint",
    "other": "other (data, log, Megatron's own synchronization)",
}


def on_one_clock(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Return the traces in seconds since the first span of all.

    Wall clocks of different hosts differ; where that would let a message arrive before it was sent,
    later stages are shifted by as little as it takes.
    """
    first = min(trace.header["started"] for trace in traces)
    shifted = {
        trace.header["rank"]: _shift(trace, trace.header["started"] - first) for trace in traces
    }
    by_pipeline: dict[int, list[RankTrace]] = {}
    for trace in shifted.values():
        by_pipeline.setdefault(trace.header["replica"], []).append(trace)
    for pipeline in by_pipeline.values():
        pipeline.sort(key=lambda trace: trace.stage)
        for position in range(1, len(pipeline)):
            shift = _least_shift(pipeline[position - 1], pipeline[position])
            pipeline[position] = _shift(pipeline[position], shift)
        shifted |= {trace.header["rank"]: trace for trace in pipeline}
    begin = min(
        (span.begin for trace in shifted.values() for span in trace.spans), default=0.0
    )
    return [_shift(shifted[rank], -begin) for rank in sorted(shifted)]


def _shift(trace: RankTrace, seconds: float) -> RankTrace:
    spans = [
        dataclasses.replace(span, begin=span.begin + seconds, end=span.end + seconds)
        for span in trace.spans
    ]
    return dataclasses.replace(trace, spans=spans)


def _least_shift(upper: RankTrace, lower: RankTrace) -> float:
    """Return how far the lower stage has to move so that no message comes before it was sent."""
    at_least, at_most = -float("inf"), float("inf")
    for sender, receiver in _messages(upper, lower):
        if sender.kind == "F":
            at_least = max(at_least, sender.end - receiver.begin)
        else:
            at_most = min(at_most, receiver.begin - sender.end)
    if at_least <= 0 <= at_most or at_least > at_most:
        return max(at_least, 0.0) if at_least > at_most else 0.0
    return at_least if at_least > 0 else at_most


def _messages(upper: RankTrace, lower: RankTrace) -> Iterator[tuple[Span, Span]]:
    """Yield (pass that sent, pass that received) between two neighbouring stages."""
    passes = [
        {_key(span): span for span in trace.spans if span.kind in ("F", "B")}
        for trace in (upper, lower)
    ]
    for key, above in passes[0].items():
        if (below := passes[1].get(key)) is not None:
            yield (above, below) if above.kind == "F" else (below, above)


def _key(span: Span) -> tuple:
    facts = span.facts
    return span.kind, facts.get("stream"), facts.get("chunk"), facts.get("microbatch")


def shares(
    trace: RankTrace, *, since: float = -math.inf, until: float = math.inf
) -> dict[str, float]:
    """Return the seconds of each cause (keys of ``CAUSES``), from the first span to the last.

    Only time between ``since`` and ``until`` (seconds of the trace's clock) counts. A wait
    before the first backward of a stream is called filling, one after its last forward draining.
    """
    spans = [span for span in trace.spans if span.end > span.begin]
    seconds = dict.fromkeys(CAUSES, 0.0)
    if not spans:
        return seconds
    phases = _phases(spans)
    for span, phase in zip(spans, phases):
        inside = min(span.end, until) - max(span.begin, since)
        seconds[_cause(span, phase)] += max(0.0, inside)
    begin, end = min(span.begin for span in spans), max(span.end for span in spans)
    whole = min(end, until) - max(begin, since)
    seconds["other"] += max(0.0, whole - sum(seconds.values()))
    return seconds


def _cause(span: Span, phase: str) -> str:
    if span.kind in ("F", "B", "settle", "evaluate", "checkpoint"):
        return span.kind
    if span.kind in ("close", "STEP"):
        return "step"
    if span.kind != "wait":
        return "other"
    if phase != "steady":
        return phase
    return {"F": "input", "B": "gradient", "R": "report"}.get(_message(span), "message")


def _phases(spans: Sequence[Span]) -> list[str]:
    """Return for each span whether the pipeline was filling, steady or draining."""
    first_backward: dict[Any, int] = {}
    last_forward: dict[Any, int] = {}
    streams = _streams(spans)
    for index, span in enumerate(spans):
        if span.kind == "B":
            first_backward.setdefault(streams[index], index)
        elif span.kind == "F":
            last_forward[streams[index]] = index
    phases = []
    for index, stream in enumerate(streams):
        if index < first_backward.get(stream, len(spans)):
            phases.append("fill")
        elif index > last_forward.get(stream, -1):
            phases.append("drain")
        else:
            phases.append("steady")
    return phases


def _streams(spans: Sequence[Span]) -> list[Any]:
    """Return the stream that each span belongs to.

    That is the one of the pass it precedes; a report is waited for behind a pass.
    """
    before: list[Any] = []
    after: list[Any] = []
    for found, order in ((before, spans), (after, reversed(spans))):
        stream = None
        for span in order:
            if span.kind in ("F", "B"):
                stream = span.facts.get("stream")
            found.append(stream)
    return [
        last if following is None or _message(span) == "R" else following
        for span, last, following in zip(spans, before, reversed(after))
    ]


def _message(span: Span) -> str:
    """Return the kind of message that is waited for: F, B or R; empty if it is not known."""
    return (span.facts.get("message") or "")[:1]


def chrome_trace(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return traces that are on one clock in Chrome's format, which Perfetto opens.

    One process per rank; arrows lead from a pass to the one it sent to; counters show the version
    of the weights and the microbatches in flight.
    """
    events: list[dict[str, Any]] = []
    for trace in traces:
        events += _rank_events(trace)
    number = 0
    pipelines: dict[int, list[RankTrace]] = {}
    for trace in traces:
        pipelines.setdefault(trace.header["replica"], []).append(trace)
    for pipeline in pipelines.values():
        pipeline.sort(key=lambda trace: trace.stage)
        for upper, lower in zip(pipeline, pipeline[1:]):
            for sender, receiver in _messages(upper, lower):
                down = sender.kind == "F"
                ends = (upper, lower) if down else (lower, upper)
                number += 1
                common = {"name": "activation" if down else "gradient", "cat": "message",
                          "id": number, "tid": 0}
                # Arrows stick to the slice around their time.
                events.append({**common, "ph": "s", "pid": ends[0].header["rank"],
                               "ts": _micro(sender.begin)})
                events.append({**common, "ph": "f", "bp": "e", "pid": ends[1].header["rank"],
                               "ts": _micro(receiver.begin)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rank_events(trace: RankTrace) -> list[dict[str, Any]]:
    rank, in_flight = trace.header["rank"], 0
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0,
         "args": {"name": f"stage {trace.stage}, rank {rank}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0,
         "args": {"sort_index": trace.stage}},
    ]
    version = None
    for span in trace.spans:
        common = {"pid": rank, "tid": 0, "ts": _micro(span.begin), "args": span.facts}
        if span.end == span.begin and span.kind in ("send", "iteration"):
            events.append({**common, "ph": "i", "s": "t", "name": _name(span)})
            continue
        events.append({**common, "ph": "X", "dur": _micro(span.seconds), "name": _name(span),
                       "cat": span.kind})
        if span.kind in ("F", "B"):
            in_flight += 1 if span.kind == "F" else -1
            events.append(_counter(rank, span.end, "in flight", in_flight))
            if span.facts.get("version", version) != version:
                version = span.facts["version"]
                events.append(_counter(rank, span.begin, "version", version))
    return events


def _counter(rank: int, seconds: float, name: str, value: float) -> dict[str, Any]:
    return {"ph": "C", "pid": rank, "tid": 0, "ts": _micro(seconds), "name": name,
            "args": {name: value}}


def _name(span: Span) -> str:
    if span.kind in ("F", "B"):
        return f"{span.kind}{span.facts.get('microbatch', '')}"
    message = span.facts.get("message")
    return f"{span.kind} {message}" if message else span.kind


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 1)
