"""Real training of a small GPT in real time: parameters, and what is made of results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_paci.bench.theory import utilization
from megatron_paci.bench.wall import WallRun, median_causes, median_costs, median_ratio


@dataclass(frozen=True, kw_only=True)
class RealRun(WallRun):
    """Parameters of one training."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocab: int
    micro_batch: int
    """Sequences per microbatch."""

    def problems(self) -> list[str]:
        """Return what is wrong with the parameters, each with its remedy; none if they can run."""
        found = super().problems()
        parts = self.stages * self.num_chunks
        if self.layers % parts:
            chunks = f" of {self.chunks} chunks" if self.num_chunks > 1 else ""
            found.append(
                f"--layers {self.layers}: do not spread evenly over {self.stages} stages{chunks}; "
                f"give a multiple of {parts}"
            )
        if self.hidden % self.heads:
            found.append(
                f"--heads {self.heads}: does not divide --hidden {self.hidden}; give a divisor"
            )
        return found

    def model_flags(self) -> list[str]:
        """Return Megatron's flags for the model and its data."""
        return (
            f"--num-layers {self.layers} --hidden-size {self.hidden} "
            f"--num-attention-heads {self.heads} --seq-length {self.sequence} "
            f"--max-position-embeddings {self.sequence} --vocab-size {self.vocab} "
            f"--make-vocab-size-divisible-by 1 --micro-batch-size {self.micro_batch} "
            f"--global-batch-size {self.microbatches * self.micro_batch} "
            "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
            "--lr 1e-4 --eval-iters 0 --eval-interval 1000000 --seed 1"
        ).split()

    @property
    def tokens(self) -> int:
        """Tokens of an iteration."""
        return self.microbatches * self.micro_batch * self.sequence


def results_of(
    runs: Mapping[str, RealRun], measured: Mapping[str, Sequence[dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Return what the repetitions of some schedules come to, all with the same microbatches.

    Keys per schedule: ``tokens_per_second`` (median), ``seconds_per_iteration`` of each repetition,
    ``costs`` and ``seconds_by_cause`` per stage (median), ``predicted_seconds`` of an iteration by
    the simulator from these costs. Beside 1F1B also ``ratio``, how many
    times as fast it is (median of the repetitions' ratios); ``ratio_theory`` by the formulas;
    ``ratio_predicted`` by the simulator, from the times of passes and steps as they were in each
    schedule's own runs, and ``ratio_predicted_1f1b`` from those of 1F1B alone; ``of_predicted``,
    the first over the third. Steps count as they are under PACI, if it is there: those of Megatron
    also wait for the other stages.
    """
    costs = {name: median_costs(found) for name, found in measured.items()}
    if "paci" in costs:
        for own in costs.values():
            for cost, alone in zip(own, costs["paci"]):
                cost["step"] = alone["step"]
    results = {}
    for name, run in runs.items():
        seconds = [each["seconds_per_iteration"] for each in measured[name]]
        results[name] = {
            "tokens_per_second": run.tokens / statistics.median(seconds),
            "seconds_per_iteration": seconds,
            "predicted_seconds": run.predicted_seconds(costs[name]),
            "costs": costs[name],
            "seconds_by_cause": median_causes(measured[name]),
        }
        if "1f1b" in runs:
            results[name] |= _ratios(run, runs["1f1b"], costs, measured)
    return results


def _ratios(
    run: RealRun,
    base: RealRun,
    costs: Mapping[str, list[dict[str, float]]],
    measured: Mapping[str, Sequence[dict[str, Any]]],
) -> dict[str, float | None]:
    theory, base_theory = (
        float(utilization(each.schedule, each.stages, each.microbatches, chunks=each.chunks))
        for each in (run, base)
    )
    ratio = median_ratio(measured[run.schedule], measured[base.schedule])
    before = base.predicted_seconds(costs[base.schedule])
    predicted = before / run.predicted_seconds(costs[run.schedule])
    return {
        "ratio": ratio,
        "ratio_theory": theory / base_theory,
        "ratio_predicted": predicted,
        "ratio_predicted_1f1b": before / run.predicted_seconds(costs[base.schedule]),
        "of_predicted": ratio / predicted,
    }
