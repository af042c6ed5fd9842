"""What the simulator says of the schedules, with the times of passes that a run has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from megatron_paci.simulate.figures import MOST_PASSES, Memory, measure, num_passes
from megatron_paci.simulate.schedules import plan
from megatron_paci.simulate.timing import Costs


def predicted_seconds(
    run: Mapping[str, Any], costs: Sequence[Mapping[str, float]]
) -> float | None:
    """Return the seconds per iteration of a run's schedule without any delay but the schedule's.

    Args:
        run: ``schedule``, ``num_stages``, ``num_microbatches``, ``accumulation``, ``chunks``,
            ``extra_in_flight``, ``defer_step``.
        costs: Per stage the seconds of ``forward``, ``backward`` and ``step``.

    Returns:
        None where the simulator has no answer: too many passes, or an interleaved schedule whose
        microbatches are no multiple of the stages.
    """
    n, m, extra = run["num_stages"], run["num_microbatches"], run["extra_in_flight"]
    if len(costs) != n or num_passes(n, m, 1, extra_in_flight=extra) > MOST_PASSES:
        return None
    if run["schedule"] == "interleaved" and (n == 1 or m % n):
        return None
    if not any(cost["forward"] + cost["backward"] for cost in costs):
        return None
    lists = ([cost[key] for cost in costs] for key in ("forward", "backward", "step"))
    forward, backward, step = lists
    given = Costs(forward, backward, [0.0] * n, step)  # a backward is never split here
    make = partial(_plan, run)
    return float(measure(make, given, Memory.in_microbatches(n)).iteration_time)


def _plan(run: Mapping[str, Any], iterations: int) -> Any:
    return plan(
        run["schedule"], run["num_stages"], run["num_microbatches"], iterations=iterations,
        accumulation=run["accumulation"], chunks=run["chunks"],
        extra_in_flight=run["extra_in_flight"], defer_step=run["defer_step"],
    )
