"""Which microbatch size and ``a`` to take for a model, from simulated time and counted memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatron_paci.delay import SAFE_DRIFT
from megatron_paci.schedule import StageSchedule
from megatron_paci.simulate.figures import Figures, Memory, measure
from megatron_paci.simulate.models import Model, balanced, stage_costs, static_bytes
from megatron_paci.simulate.schedules import plan
from megatron_paci.simulate.timing import Costs

NEARLY_EQUAL = 0.95  # Below measured differences in speed of so much, drift decides.
MANY = 8  # Microbatches per stage from which on 1F1B has next to no bubble.


@dataclass(frozen=True, kw_only=True)
class Job:
    """What shall be trained on what."""

    model: Model
    stages: int
    replicas: int
    """Data-parallel copies of the pipeline."""
    batch: int
    """Samples per update of 1F1B: the global batch."""
    layers: Sequence[int]
    """Per stage."""
    width: int = 2
    """Bytes of a weight or activation."""
    distributed_optimizer: bool = False
    keep_scores: bool = False
    """Whether attention keeps its scores for the backward."""
    chunks: int = 2
    """Of interleaved 1F1B."""
    latency: float = 0.0
    """Of a message, in forwards of an average stage."""

    @property
    def costs(self) -> Costs:
        """Times per stage, in forwards of an average stage."""
        return Costs(*stage_costs(self.model, self.layers), [0] * self.stages, self.latency)

    def static(self) -> list[dict[str, float]]:
        """Return the bytes of weights, gradients and optimizer state per stage."""
        return [
            {name: float(value) for name, value in static_bytes(
                self.model.stage_parameters(
                    count, first=stage == 0, last=stage == self.stages - 1
                ),
                width=self.width, replicas=self.replicas,
                distributed_optimizer=self.distributed_optimizer,
            ).items()}
            for stage, count in enumerate(self.layers)
        ]

    def memory(self, microbatch_size: int) -> Memory:
        """Return the bytes per stage with microbatches of a size."""
        activations, static = [], []
        for stage, (count, bytes_of) in enumerate(zip(self.layers, self.static())):
            first, last = self.model.edge_activations(
                first=stage == 0, last=stage == self.stages - 1, width=self.width
            )
            layer = self.model.layer_activations(width=self.width, keep_scores=self.keep_scores)
            activations.append(microbatch_size * (count * layer + first))
            # Of the logits there is one microbatch at a time, whatever the schedule.
            static.append(sum(bytes_of.values()) + microbatch_size * last)
        return Memory(activations, activations, static)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What one microbatch size comes to, with one update per global batch."""

    microbatch_size: int
    microbatches: int
    """Per update and replica; ``a`` as well."""
    drift_bound: int
    """Delta_max = ceil((N - 1) / a)."""
    mean_drift: float
    """Of the first stage, in a filled stream: (N - 1) / a."""
    least_accumulation: int
    """Smallest ``a`` with the same bound of 1, or ``a`` itself where there is none."""
    paci: Figures
    one_f_one_b: Figures
    interleaved: Figures | None
    """None where the schedule cannot run."""
    relative_speed: float
    """Of a stage, in samples per time, against the other sizes."""

    def samples_per_time(self, figures: Figures) -> float:
        """Return the throughput under a schedule, comparable between microbatch sizes.

        In microbatches per time it would be that of the schedule alone; a microbatch takes as much
        longer as it is larger, apart from the relative speed.
        """
        return self.relative_speed * self.microbatches / float(figures.iteration_time)


def candidate(job: Job, microbatch_size: int, *, relative_speed: float = 1.0) -> Candidate:
    """Return the figures of a microbatch size, which divides the batch of a replica."""
    n = job.stages
    m = job.batch // (job.replicas * microbatch_size)
    costs, memory = job.costs, job.memory(microbatch_size)
    # A step takes no time here, so `a` does not change the time of a stream: one forward is an
    # iteration of its own, which keeps the simulation short.
    stream = measure(
        lambda count: plan("paci", n, 1, iterations=count), costs, memory, iterations=4 * n
    )
    paci = Figures(
        stream.utilization, stream.iteration_time * m, stream.activations, stream.memory,
        StageSchedule(0, n, m).drift_bound,
    )
    timed = partial(measure, costs=costs, memory=memory)
    can_interleave = n > 1 and m % n == 0 and all(
        count % job.chunks == 0 for count in job.layers
    )
    return Candidate(
        microbatch_size=microbatch_size,
        microbatches=m,
        drift_bound=paci.drift,
        mean_drift=(n - 1) / m,
        least_accumulation=min(
            (a for a in range(1, m + 1) if m % a == 0 and a >= n - 1), default=m
        ),
        paci=paci,
        one_f_one_b=timed(lambda count: plan("1f1b", n, m, iterations=count)),
        interleaved=timed(
            lambda count: plan("interleaved", n, m, iterations=count, chunks=job.chunks)
        ) if can_interleave else None,
        relative_speed=relative_speed,
    )


def choose(
    candidates: Sequence[Candidate], *, measured_speeds: bool, limit: float | None = None
) -> Candidate | None:
    """Return the candidate to take.

    Of those that fit, the ones with the smallest bound on drift count, but 1 is as good as 0.
    Without measured speeds the largest microbatches win, since kernels only get more efficient with
    them. With measured ones the fastest wins; of those nearly as fast the one with the least drift.

    Args:
        limit: Bytes per device; None for no limit.

    Returns:
        None if none fits.
    """
    fitting = [
        entry for entry in candidates if limit is None or max(entry.paci.memory) <= limit
    ]
    if not fitting:
        return None
    bound = max(SAFE_DRIFT, min(entry.drift_bound for entry in fitting))
    stable = [entry for entry in fitting if entry.drift_bound <= bound]
    if not measured_speeds:
        return max(stable, key=lambda entry: entry.microbatch_size)
    fastest = max(entry.samples_per_time(entry.paci) for entry in stable)
    near = [
        entry for entry in stable if entry.samples_per_time(entry.paci) >= NEARLY_EQUAL * fastest
    ]
    return min(near, key=lambda entry: entry.mean_drift)


def warnings(job: Job, chosen: Candidate) -> list[str]:
    """Return what speaks against the choice, or against PACI."""
    n, m = job.stages, chosen.microbatches
    found = []
    if chosen.drift_bound > SAFE_DRIFT:
        found.append(
            f"Delta_max is {chosen.drift_bound}: a backward may meet weights that are so many "
            f"updates newer. Smaller microbatches or fewer stages, so that a >= {n - 1}, make it 1."
        )
    if m < n:
        found.append(
            f"PACI keeps the activations of {n} microbatches on the first stage, 1F1B with so few "
            f"microbatches only {m}."
        )
    if n > 1 and m >= MANY * n:
        found.append(
            f"{m} microbatches are {m / n:g} per stage: 1F1B has next to no bubble to lose "
            f"({(n - 1) / (m + n - 1):.1%} with even stages). From {MANY} per stage on stay with "
            "it, or take larger microbatches."
        )
    if n == 1:
        found.append("One stage has no pipeline: PACI is plain gradient accumulation there.")
    slowest = min(chosen.paci.utilization)
    even = balanced(job.model, n)
    if slowest < 0.9 and even != list(job.layers):
        now, best = (_slowest(job.model, layers) for layers in (job.layers, even))
        found.append(
            f"The stages are uneven: the least busy one computes {float(slowest):.0%} of the time "
            "even under PACI, because it waits for the slowest (the output layer counts as "
            f"{_layers_of_output(job.model):.1f} layers). With --layers-per-stage "
            f"{','.join(map(str, even))} the slowest takes {best:.2f} forwards of an average one "
            f"per microbatch in place of {now:.2f}."
        )
    return found


def _slowest(model: Model, layers: Sequence[int]) -> float:
    return max(map(sum, zip(*stage_costs(model, layers))))


def _layers_of_output(model: Model) -> float:
    return 3 * model.embedding_parameters / sum(model.operations(1, last=False))
