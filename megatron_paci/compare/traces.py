"""From the traces of training runs (``--paci-trace``) to figures: where time went, costs.

Pure: no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_paci.simulate.picture import Panel
from megatron_paci.trace import CAUSES, on_one_clock, shares
from megatron_paci.trace_command import iteration_ends, panel_of
from megatron_paci.trace_file import RankTrace, TraceError, read_traces

PICTURED_PASSES = 16


def trace_figures(
    directory: Path, *, skip: int, iterations: int | None = None
) -> dict[str, Any]:
    """Return what the traces in a folder tell, from iteration ``skip`` + 1 on.

    Args:
        iterations: How many of them to take; None for all that follow.

    Keys: ``seconds_by_cause`` (keys of ``trace.CAUSES``) and ``utilization`` (share of passes and
    updates) per stage, averaged over the ranks of a stage; ``costs``, see ``_costs``;
    ``truncated``, the ranks whose file ends within a line.

    Raises:
        TraceError: There is no trace, or it is damaged or too short.
        OSError: It cannot be read.
    """
    traces = read_traces(directory)
    last = skip + (iterations or 1)
    if min(len(iteration_ends(trace)) for trace in traces) < last:
        raise TraceError(f"{directory}: the trace ends before iteration {last} does")
    stages: list[list[RankTrace]] = [[] for _ in range(traces[0].header["num_stages"])]
    for trace in traces:
        stages[trace.stage].append(trace)
    by_stage, costs = [], []
    for ranks in stages:
        spans = [(_begin(rank, skip), _end(rank, iterations and last)) for rank in ranks]
        spent = [shares(rank, since=a, until=b) for rank, (a, b) in zip(ranks, spans)]
        by_stage.append({cause: statistics.fmean(s[cause] for s in spent) for cause in CAUSES})
        costs.append(_costs(ranks, spans))
    return {
        "seconds_by_cause": by_stage,
        "utilization": [_busy(seconds) for seconds in by_stage],
        "costs": costs,
        "truncated": [trace.header["rank"] for trace in traces if trace.truncated],
    }


def timeline_panel(directory: Path, *, title: str, num_microbatches: int) -> Panel:
    """Return the time line of a few iterations in the middle of a run.

    Raises:
        TraceError: There is no trace, or it has no passes.
        OSError: It cannot be read.
    """
    traces = on_one_clock(read_traces(directory))
    last = min(len(iteration_ends(trace)) for trace in traces)
    shown = max(1, min(last, PICTURED_PASSES // num_microbatches))
    first = max(1, (last - shown) // 2 + 1)
    span = f"iterations {first} to {first + shown - 1}" if shown > 1 else f"iteration {first}"
    return panel_of(traces, first, first + shown - 1, f"{title}, {span}")


def _costs(
    ranks: Sequence[RankTrace], spans: Sequence[tuple[float, float]]
) -> dict[str, float]:
    """Return the median seconds of a stage's forward, backward (all chunks) and update.

    Args:
        spans: Per rank the times between which passes count.
    """
    found: dict[tuple[str, int], list[float]] = {}
    for rank, (begin, end) in zip(ranks, spans):
        for span in rank.spans:
            if begin <= span.begin < end and span.kind in ("F", "B", "close", "STEP"):
                found.setdefault((span.kind, span.facts.get("chunk", 0)), []).append(span.seconds)
    medians: dict[str, float] = dict.fromkeys(("F", "B", "close", "STEP"), 0.0)
    for (kind, _), seconds in found.items():
        medians[kind] += statistics.median(seconds)
    return {
        "forward": medians["F"],
        "backward": medians["B"],
        "step": medians["close"] + medians["STEP"],
    }


def _begin(trace: RankTrace, skip: int) -> float:
    return dict(iteration_ends(trace)).get(skip, 0.0)


def _end(trace: RankTrace, number: int | None) -> float:
    """Return when an iteration ends, the last one if None."""
    ends = iteration_ends(trace)
    return ends[-1][1] if number is None else dict(ends)[number]


def _busy(seconds: dict[str, float]) -> float:
    whole = sum(seconds.values())
    return (seconds["F"] + seconds["B"] + seconds["step"]) / whole if whole else 0.0
