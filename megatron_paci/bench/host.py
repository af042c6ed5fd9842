"""Host cost: the Python time that a schedule's own loop takes per microbatch, measured.

Megatron's 1F1B and PACI run in turns in this process, on a stage whose passes, messages and updates
take no time (host_rig.py).
"""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_paci.bench.host_rig import HostRig

WARMUP = 20


@dataclass(frozen=True, kw_only=True)
class HostRun:
    """Parameters of one measurement."""

    stages: int = 4
    microbatches: int = 64
    """Per iteration."""
    accum: int | None = None
    """PACI: backward passes per optimizer step; None for all microbatches of an iteration."""
    repetitions: int = 300
    """Iterations of each schedule that are measured on each stage."""
    profile: int = 0
    """Lines of a profile of each schedule on a middle stage; 0 for none."""


def measure(run: HostRun) -> dict[str, Any]:
    """Measure the first, a middle and the last stage.

    Returns:
        ``ratio``, PACI / 1F1B on the stage where it is largest; ``stages``, for each stage its
        number, microseconds per microbatch of both, and their ratio, without posting messages and
        with it (``host_rig.HostRig``), and ``telemetry_us``, what PACI takes longer while it is
        observed; ``profile`` by schedule, text; ``parameters``.
    """
    # Here, since the command line has to be quick without PyTorch.
    from megatron_paci.bench.host_rig import HostRig

    def rig(stage: int, **options: bool) -> HostRig:
        return HostRig(
            stage, run.stages, run.microbatches, run.accum or run.microbatches, **options
        )

    stages = []
    for stage in sorted({0, run.stages // 2, run.stages - 1}):
        plain, observed = compare(rig(stage), run), compare(rig(stage, observed=True), run)
        stages.append({
            "stage": stage,
            **plain,
            "with_posting": compare(rig(stage, posting=True), run),
            "telemetry_us": observed["paci_us"] - plain["paci_us"],
        })
    profile = {"profile": profiles(rig(run.stages // 2), run)} if run.profile else {}
    return {
        "parameters": asdict(run),
        "ratio": max(stage["ratio"] for stage in stages),
        "ratio_with_posting": max(stage["with_posting"]["ratio"] for stage in stages),
        "stages": stages,
        **profile,
    }


def compare(rig: HostRig, run: HostRun) -> dict[str, float]:
    """Return microseconds per microbatch and the ratio: medians over interleaved repetitions.

    Args:
        rig: Is closed at the end.
    """
    try:
        theirs, ours = [], []
        turns = [(rig.megatron, theirs), (rig.paci, ours)]
        for repetition in range(WARMUP + run.repetitions):
            for iteration, seconds in turns:
                seconds.append(_seconds(iteration))
            turns.reverse()  # neither always follows the other
            if repetition < WARMUP:
                theirs.clear()
                ours.clear()
    finally:
        rig.close()
    microseconds = 1e6 / run.microbatches
    return {
        "1f1b_us": statistics.median(theirs) * microseconds,
        "paci_us": statistics.median(ours) * microseconds,
        "ratio": statistics.median(our / their for our, their in zip(ours, theirs)),
    }


def _seconds(iteration: Callable[[], None]) -> float:
    """Return the processor time of this thread: what others do on the machine is not in it."""
    begin = time.thread_time()
    iteration()
    return time.thread_time() - begin


def profiles(rig: HostRig, run: HostRun) -> dict[str, str]:
    """Return where the time of either loop goes, by function; the profiler's own cost is in it.

    Args:
        rig: Is closed at the end.
    """
    try:
        texts = {}
        for name, iteration in (("1f1b", rig.megatron), ("paci", rig.paci)):
            profile = cProfile.Profile()
            for _ in range(run.repetitions):
                profile.runcall(iteration)
            text = io.StringIO()
            pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(
                run.profile
            )
            texts[name] = text.getvalue()
        return texts
    finally:
        rig.close()
