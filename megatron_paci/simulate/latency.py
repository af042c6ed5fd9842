"""Whether more microbatches in flight are worth it for a model: what they give, what they cost."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_paci.schedule import StageSchedule
from megatron_paci.simulate.advice import Candidate, Job
from megatron_paci.simulate.figures import measure
from megatron_paci.simulate.schedules import plan

WORTHWHILE = 1.01  # A gain in speed below that is not worth activations and drift.
MOST_EXTRA = 4


@dataclass(frozen=True, kw_only=True)
class MoreInFlight:
    """What ``--paci-extra-in-flight`` comes to, beside a candidate without it."""

    extra_in_flight: int
    speed_up: float
    """Of PACI over PACI without it."""
    in_flight: int
    """On the first stage."""
    memory: float
    """Bytes of the fullest stage."""
    drift_bound: int
    fits: bool

    def __str__(self) -> str:
        return (
            f"--paci-extra-in-flight {self.extra_in_flight}: {self.speed_up:.3f} times as fast, "
            f"{self.in_flight} microbatches in flight on the first stage, "
            f"{self.memory / 1e9:.1f} GB on the fullest one"
            + ("" if self.fits else " (more than there is)")
            + f", Delta_max {self.drift_bound}"
        )


def more_in_flight(
    job: Job, chosen: Candidate, *, limit: float | None = None
) -> list[MoreInFlight]:
    """Return what each number of microbatches more comes to, as long as one more is worthwhile.

    Args:
        limit: Bytes per device; None for no limit.
    """
    found: list[MoreInFlight] = []
    if not job.latency:
        return found
    n, m = job.stages, chosen.microbatches
    alone = float(chosen.paci.iteration_time) / m
    fastest = 1.0
    for extra in range(1, MOST_EXTRA + 1):
        first = StageSchedule(0, n, m, extra)
        # As in advice.candidate: a forward is an iteration of its own.
        figures = measure(
            lambda count, extra=extra: plan("paci", n, 1, iterations=count, extra_in_flight=extra),
            job.costs, job.memory(chosen.microbatch_size), iterations=4 * n,
        )
        speed_up = alone / float(figures.iteration_time)
        if speed_up < WORTHWHILE * fastest:
            break
        fastest = speed_up
        memory = float(max(figures.memory))
        found.append(MoreInFlight(
            extra_in_flight=extra, speed_up=speed_up, in_flight=first.depth, memory=memory,
            drift_bound=first.drift_bound, fits=limit is None or memory <= limit,
        ))
    return found


def latency_lines(job: Job, chosen: Candidate, offers: list[MoreInFlight]) -> list[str]:
    """Return the advice as lines of text; none where messages take no time."""
    if not job.latency:
        return []
    if not offers:
        return [f"Messages of {job.latency:g} forwards cost next to nothing: leave "
                "--paci-extra-in-flight at 0.", ""]
    return [
        f"Messages of {job.latency:g} forwards cost time. More microbatches in flight hide it "
        f"(without: {job.stages} on the first stage, {max(chosen.paci.memory) / 1e9:.1f} GB on the "
        f"fullest one, Delta_max {chosen.drift_bound}):",
        *map(str, offers), "",
    ]
