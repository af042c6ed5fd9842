"""What delay may cost in quality with a candidate, and what helps: from docs/convergence.md."""

from __future__ import annotations

from megatron_paci.delay import COMPARE
from megatron_paci.simulate.advice import Candidate, Job

START = 0.1
"""The part of all samples that a synchronous start takes in the experiments."""


def gain_with_start(gain: float, part: float = START) -> float:
    """Return PACI's speed over 1F1B if it trains a part of the samples at 1F1B's own speed."""
    return 1 / (part + (1 - part) / gain)


def learning_lines(job: Job, chosen: Candidate) -> list[str]:
    """Return the advice as lines of text; none where no gradient is late."""
    if job.stages == 1:
        return []
    gain = chosen.samples_per_time(chosen.paci) / chosen.samples_per_time(chosen.one_f_one_b)
    return [
        "What delay may cost in quality depends on the optimizer most of all. Nats are those of "
        "small runs on eight stages (docs/convergence.md):",
        "- With Muon least, 0.01 with a = 16 and 0.05 with a = 8: --optimizer muon --muon-nesterov "
        "--muon-momentum 0.8.",
        "- With AdamW 0.22 and 0.47, and a synchronous start takes back a part of it, 0.09 instead "
        "of 0.22: in the place of "
        f"--paci-accum {chosen.microbatches} --paci-accum-schedule "
        f"sync:0,{chosen.microbatches}:SAMPLES. With a tenth of all samples PACI is "
        f"{gain_with_start(gain):.3f} instead of {gain:.3f} times as fast as 1F1B.",
        f"- The mean drift counts, not its bound alone; here it is {chosen.mean_drift:.2f}. "
        "Microbatches of half the size make half of it, which is the step from a = 8 to 16.",
        f"- Before a long run: {COMPARE}.",
        "",
    ]
