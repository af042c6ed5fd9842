"""What a clock tells about the iterations between two moments."""

from __future__ import annotations

from collections import Counter
from typing import Any

from megatron_paci.bench.call_sites import Collective
from megatron_paci.bench.clock import Iteration, Timeline


def stage_result(
    begin: Iteration, end: Iteration, *, stage: int, iterations: int
) -> dict[str, Any]:
    """Return what one rank did between the ends of two iterations, as plain values.

    Args:
        begin: State at the start.
        end: State ``iterations`` iterations later.

    Returns:
        ``utilization`` and ``schedule_utilization`` (0 to 1); ``elapsed``, ``compute`` and ``idle``
        by cause (virtual time in all) of the training loop, and the same of the schedule function
        alone under ``schedule``; ``cross_stage_collectives`` (per iteration) and ``call_sites``,
        one entry for each of them with its idle time in all.
    """
    loop, schedule = end.loop.since(begin.loop), end.schedule.since(begin.schedule)
    counts = {
        cause: count
        for cause, count in (end.collectives - begin.collectives).items()
        if cause.crosses
    }
    return {
        "stage": stage,
        "utilization": float(loop.utilization),
        "schedule_utilization": float(schedule.utilization),
        **_times(loop),
        "schedule": _times(schedule),
        "cross_stage_collectives": sum(counts.values()) / iterations,
        "call_sites": [
            {
                **cause._asdict(),
                "per_iteration": count / iterations,
                "idle": float(loop.idle.get(cause, 0)),
            }
            for cause, count in sorted(counts.items())
        ],
    }


def _times(timeline: Timeline) -> dict[str, Any]:
    idle: Counter[str] = Counter(
        {"forward_message": 0, "backward_message": 0, "other_message": 0, "collective": 0}
    )
    for cause, time in timeline.idle.items():
        idle["collective" if isinstance(cause, Collective) else cause] += time
    return {
        "elapsed": float(timeline.now),
        "compute": float(timeline.compute),
        "idle": {cause: float(time) for cause, time in idle.items()},
    }


def job_result(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the results of all ranks together, one entry of each list per stage.

    Of several ranks of a stage the one that was least busy counts. The number of collectives is
    that of the rank with most of them; idle times at a call site are listed by stage.
    """
    stages: dict[int, dict[str, Any]] = {}
    for rank in sorted(ranks, key=lambda rank: rank["utilization"], reverse=True):
        stages[rank["stage"]] = rank
    sites: dict[tuple, dict[str, Any]] = {}
    for rank in ranks:
        for entry in rank["call_sites"]:
            key = (entry["call"], tuple(entry["stages"]), entry["site"], tuple(entry["callers"]))
            merged = sites.setdefault(key, {**entry, "idle": [0.0] * len(stages)})
            merged["per_iteration"] = max(merged["per_iteration"], entry["per_iteration"])
            idle = merged["idle"]
            idle[rank["stage"]] = max(idle[rank["stage"]], entry["idle"])
    per_stage = ("utilization", "schedule_utilization", "elapsed", "compute", "idle", "schedule")
    return {
        **{name: [stages[s][name] for s in sorted(stages)] for name in per_stage},
        "cross_stage_collectives": max(rank["cross_stage_collectives"] for rank in ranks),
        "call_sites": list(sites.values()),
    }
