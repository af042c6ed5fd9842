"""The plan's runs once more, short and in virtual time: what the schedule costs without any noise.

Each run is the user's own script with the same flags on the CPU, for a few iterations, under the
logical clocks of megatron_paci/bench: passes and updates cost what they cost on average in a
measured run, the same for every schedule, and messages and collectives take no time of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_paci.bench.ranks import RankError, run_ranks
from megatron_paci.bench.results import job_result
from megatron_paci.bench.training_run import LAST_ITERATIONS
from megatron_paci.compare.plan import Plan, Run, own_folders
from megatron_paci.schedule import StageSchedule

RESULT = "virtual.json"
MOST_ITERATIONS = 8
SECONDS = 900


def measure_virtual(
    plan: Plan, run: Run, figures: Mapping[str, Any], costs: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Return and store utilization per stage and seconds per iteration of a run in virtual time.

    Args:
        figures: Of the run (``records.run_figures``).
        costs: Per stage the seconds of ``forward``, ``backward`` and ``step``.

    Returns:
        ``utilization``, ``seconds_per_iteration``, ``cross_stage_collectives`` per iteration,
        ``iterations``; or ``error``.
    """
    texts = _texts(costs)
    found = {"costs": texts, **_measure(plan, run, figures, texts)}
    (run.path / RESULT).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def stored_virtual(run: Run, costs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return what ``measure_virtual`` has stored for the same costs; empty if nothing."""
    try:
        found = json.loads((run.path / RESULT).read_text(encoding="utf-8"))
        return found if found["costs"] == _texts(costs) and "error" not in found else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _texts(costs: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return costs as ``bench.costs`` reads them."""
    return {
        key: ",".join(f"{cost[key]:.6f}" for cost in costs)
        for key in ("forward", "backward", "step")
    }


def _measure(
    plan: Plan, run: Run, figures: Mapping[str, Any], costs: Mapping[str, str]
) -> dict[str, Any]:
    # The first backward of the first stage comes after as many forwards as can be in flight.
    in_flight = StageSchedule(0, figures["num_stages"], 1, figures["extra_in_flight"]).depth
    warmup = max(3, -(-in_flight // figures["num_microbatches"]) + 1)
    iterations = min(MOST_ITERATIONS, len(figures["loss"]) - warmup - LAST_ITERATIONS)
    if iterations < 1:
        return {"error": "too few iterations for a measurement in virtual time; train "
                         f"{warmup + LAST_ITERATIONS + 1} or more"}
    folder = run.path / "virtual"
    arguments = [
        *plan.arguments, *run.added, *own_folders(plan.arguments, folder),
        *(["--wandb-project", ""] if "--wandb-project" in plan.arguments else []),
        "--exit-interval", str(warmup + iterations + LAST_ITERATIONS),
    ]
    request = {
        "measurement": "virtual", "script": plan.script, "arguments": arguments,
        "num_stages": figures["num_stages"], "costs": dict(costs), "latency": "0",
        "result": {"warmup": warmup, "iterations": iterations},
    }
    try:
        [ranks] = run_ranks(plan.num_ranks, [request], folder, seconds=SECONDS)
    except RankError as error:
        return {"error": str(error)}
    result = job_result(ranks)
    return {
        "utilization": result["utilization"],
        "seconds_per_iteration": max(result["elapsed"]) / iterations,
        "cross_stage_collectives": result["cross_stage_collectives"],
        "iterations": iterations,
    }
