"""Training runs in real time: launched together, in turn, and read from their traces."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_paci.bench.ranks import run_ranks
from megatron_paci.bench.training_run import TrainingRun
from megatron_paci.compare.predict import predicted_seconds
from megatron_paci.compare.traces import trace_figures


@dataclass(frozen=True, kw_only=True)
class WallRun(TrainingRun):
    """Parameters of one run that is timed by the clock on the wall."""

    def measurement(self) -> dict[str, Any]:
        """Return what goes around the training besides its trace (``rank.MEASUREMENTS``)."""
        return {"measurement": "none"}

    def more_flags(self, folder: Path) -> list[str]:
        """Return the flags for logs: no lines while it is measured, and a trace."""
        return ["--log-interval", "1000000", "--paci-telemetry", "off",
                "--paci-trace", str(folder / "trace")]

    def for_ranks(self, folder: Path) -> dict[str, Any]:
        """Return what every rank has to know, as plain values."""
        return {
            "script": self.script,
            "arguments": self.arguments(folder),
            "result": {},
            **self.measurement(),
        }

    def figures(self, folder: Path) -> dict[str, Any]:
        """Return what the trace in ``folder`` tells of the measured iterations.

        Keys: ``seconds_per_iteration``, that of the slowest stage; ``seconds_by_cause`` of an
        iteration (keys of ``trace.CAUSES``) and ``costs`` (median seconds of ``forward``,
        ``backward``, ``step``), both per stage.
        """
        found = trace_figures(
            folder / "trace", skip=self.warmup_iterations, iterations=self.iterations
        )
        return {
            "seconds_per_iteration": max(
                sum(spent.values()) for spent in found["seconds_by_cause"]
            ) / self.iterations,
            "seconds_by_cause": [
                {cause: seconds / self.iterations for cause, seconds in spent.items()}
                for spent in found["seconds_by_cause"]
            ],
            "costs": found["costs"],
        }

    def predicted_seconds(self, costs: Sequence[dict[str, float]]) -> float | None:
        """Return the seconds of an iteration in the simulator, None where it has no answer.

        Args:
            costs: Per stage the seconds of ``forward``, ``backward`` and ``step``.
        """
        return predicted_seconds(
            {
                "schedule": self.schedule,
                "num_stages": self.stages,
                "num_microbatches": self.microbatches,
                "accumulation": self.accum or self.microbatches,
                "extra_in_flight": self.extra_in_flight,
                "defer_step": False,
                "chunks": self.chunks,
            },
            costs,
        )


def measure(
    runs: Sequence[WallRun], *, repetitions: int, seconds: float
) -> list[list[dict[str, Any]]]:
    """Train each run so many times, in one launch: first, second, ..., first, second, ...

    So a disturbance hits all of them alike.

    Args:
        runs: All with the same number of ranks.
        seconds: Limit for all of it.

    Returns:
        Per run, per repetition its ``figures``, and under ``ranks`` what the measurement tells.

    Raises:
        ranks.RankError: A rank failed or the time is up. No process is left.
    """
    [num_ranks] = {run.num_ranks for run in runs}
    with tempfile.TemporaryDirectory(prefix="megatron_paci-") as temporary:
        folders = [
            [Path(temporary) / f"{number}-{repetition}" for number in range(len(runs))]
            for repetition in range(repetitions)
        ]
        plans = [run.for_ranks(own) for each in folders for run, own in zip(runs, each)]
        results = run_ranks(num_ranks, plans, Path(temporary), seconds=seconds)
        return [
            [
                run.figures(each[number]) | {"ranks": results[repetition * len(runs) + number]}
                for repetition, each in enumerate(folders)
            ]
            for number, run in enumerate(runs)
        ]


def median_costs(repetitions: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the median over repetitions of the costs of each stage."""
    return [
        {key: statistics.median(cost[key] for cost in stage) for key in stage[0]}
        for stage in zip(*(repetition["costs"] for repetition in repetitions))
    ]


def median_ratio(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> float:
    """Return how many times as fast ``ours`` is, the median of the repetitions' ratios."""
    return statistics.median(
        other["seconds_per_iteration"] / own["seconds_per_iteration"]
        for own, other in zip(ours, theirs)
    )


def median_causes(repetitions: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the median over repetitions of where each stage's time of an iteration went."""
    return [
        {cause: statistics.median(spent[cause] for spent in stage) for cause in stage[0]}
        for stage in zip(*(repetition["seconds_by_cause"] for repetition in repetitions))
    ]
