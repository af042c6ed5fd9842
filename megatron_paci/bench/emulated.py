"""Real schedules and real messages on emulated devices: parameters, and what is made of results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_paci.bench.theory import utilization
from megatron_paci.bench.virtual import TINY_MODEL
from megatron_paci.bench.wall import WallRun, median_causes, median_ratio


@dataclass(frozen=True, kw_only=True)
class EmulatedRun(WallRun):
    """Parameters of one training on emulated devices (emulated_device.py); seconds per stage."""

    forward: Sequence[float]
    backward: Sequence[float]
    step: Sequence[float]

    def model_flags(self) -> list[str]:
        """Return Megatron's flags for the model and its data."""
        return TINY_MODEL.split() + [
            "--num-layers", str(self.stages * self.num_chunks),
            "--global-batch-size", str(self.microbatches),
            "--untie-embeddings-and-output-weights",
        ]

    def measurement(self) -> dict[str, Any]:
        """Return the device of each rank; a model chunk takes its share of its stage's time."""
        return {
            "measurement": "emulated",
            "seconds": [
                {
                    "forward": forward / self.num_chunks,
                    "backward": backward / self.num_chunks,
                    "step": step,
                }
                for forward, backward, step in zip(self.forward, self.backward, self.step)
            ],
        }

    @property
    def costs(self) -> list[dict[str, float]]:
        """What passes and steps take, per stage."""
        return [
            {"forward": forward, "backward": backward, "step": step}
            for forward, backward, step in zip(self.forward, self.backward, self.step)
        ]

    @property
    def useful_seconds(self) -> list[float]:
        """Time that each stage computes per iteration."""
        steps = self.microbatches // self.accum if self.accum else 1
        return [
            self.microbatches * (cost["forward"] + cost["backward"]) + steps * cost["step"]
            for cost in self.costs
        ]

    @property
    def theory(self) -> float | None:
        """Utilization of the slowest stage if nothing but the schedule costs time.

        None where neither the simulator nor a formula has an answer.
        """
        if (seconds := self.predicted_seconds(self.costs)) is not None:
            return max(self.useful_seconds) / seconds
        if len(set(self.useful_seconds)) > 1 or any(self.step):
            return None
        return float(
            utilization(self.schedule, self.stages, self.microbatches, chunks=self.chunks)
        )


def schedule_result(run: EmulatedRun, repetitions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the repetitions of a run come to.

    Keys: ``utilization``, useful time of the slowest stage per iteration / measured time of an
    iteration in the steady state (median); ``throughput`` in microbatches per second; ``theory``,
    the utilization if nothing but the schedule costs time; ``seconds_per_iteration`` of each
    repetition; ``seconds_by_cause`` of an iteration, per stage (median); ``late_ms``, by how much
    emulated passes ended late; ``overrun``, how many of them took longer by themselves.
    """
    seconds = [each["seconds_per_iteration"] for each in repetitions]
    useful, median = run.useful_seconds, statistics.median(seconds)
    late = [value for each in repetitions for rank in each["ranks"] for value in rank["late"]]
    return {
        "microbatches": run.microbatches,
        "utilization": max(useful) / median,
        "utilization_by_stage": [value / median for value in useful],
        "throughput": run.microbatches / median,
        "theory": run.theory,
        "seconds_per_iteration": seconds,
        "seconds_by_cause": median_causes(repetitions),
        "late_ms": {"median": 1e3 * statistics.median(late), "max": 1e3 * max(late)},
        "overrun": sum(rank["overrun"] for each in repetitions for rank in each["ranks"]),
    }


def add_ratios(
    runs: Mapping[str, EmulatedRun],
    measured: Mapping[str, Sequence[dict[str, Any]]],
    results: dict[str, dict[str, Any]],
) -> None:
    """Add to each result ``ratio``, its throughput over that of 1F1B, and ``ratio_theory``.

    Both are None where 1F1B was not measured with as many microbatches.
    """
    base = runs.get("1f1b")
    for name, result in results.items():
        run = runs.get(name)
        result["ratio"] = result["ratio_theory"] = None
        if run is None or base is None or run.microbatches != base.microbatches:
            continue
        result["ratio"] = median_ratio(measured[name], measured["1f1b"])
        predicted = [each.predicted_seconds(each.costs) for each in (base, run)]
        if None not in predicted:
            result["ratio_theory"] = predicted[0] / predicted[1]


def next_multiple(number: int, of: int) -> int:
    """Return the smallest multiple of ``of`` that is at least ``number``."""
    return of * math.ceil(number / of)
