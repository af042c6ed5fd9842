"""Peak memory of every stage under Megatron's 1F1B and under PACI, counted in real training.

What is counted: parameters, gradients and optimizer state at the end of training, the peak of what
autograd keeps for backward passes (record.py), and the peak of what messages take
(message_memory.py). Bytes of tensors, so the numbers are exact and do not depend on the machine.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_paci.bench.virtual import VirtualRun
from megatron_paci.bench.virtual import measure as train
from megatron_paci.compare.records import read_records, run_figures

SCHEDULES = ("1f1b", "paci")
SCRIPT = str(Path(__file__).with_name("counted_gpt.py"))
WEIGHTS = ("parameters", "gradients", "optimizer")
# Larger than what other benchmarks train: activations should outweigh what else a pass keeps.
FLAGS = "--hidden-size 64 --seq-length 32 --max-position-embeddings 32"
# In which record.py counts activations; that module needs PyTorch, the command line does not.
COUNTED_ITERATIONS = 3


@dataclass(frozen=True, kw_only=True)
class MemoryRun:
    """Parameters of one comparison."""

    stages: int = 4
    microbatches: int = 8
    """Per iteration."""
    accum: int | None = None
    """PACI: backward passes per optimizer step; None for all microbatches of an iteration."""
    extra_in_flight: int = 0
    """PACI: more microbatches in flight, for each link between a stage and the last one."""
    megatron_args: str = ""
    """More of Megatron's flags; they come last, so they win."""

    def run(self, schedule: str, folder: Path) -> VirtualRun:
        """Return the training under a schedule; ``folder`` receives what it counts."""
        flags = f"{FLAGS} --paci-record {shlex.quote(str(folder))}"
        if schedule == "paci" and self.extra_in_flight:
            flags += f" --paci-extra-in-flight {self.extra_in_flight}"
        return VirtualRun(
            stages=self.stages, microbatches=self.microbatches, schedule=schedule,
            accum=self.accum if schedule == "paci" else None,
            warmup=0, iterations=COUNTED_ITERATIONS, script=SCRIPT,
            megatron_args=f"--count-messages {shlex.quote(str(folder))} {flags} "
                          f"{self.megatron_args}",
        )

    def in_flight(self, schedule: str) -> list[int]:
        """Return the most microbatches in flight on each stage, by the rule of a schedule."""
        links = range(self.stages - 1, -1, -1)  # from a stage to the last one
        if schedule == "paci":
            return [1 + each * (1 + self.extra_in_flight) for each in links]
        return [min(self.microbatches, 1 + each) for each in links]


def measure(run: MemoryRun, *, folder: Path | None = None, seconds: float = 600) -> dict[str, Any]:
    """Train under both schedules, one after the other, on local CPU processes.

    Args:
        folder: Receives records and outputs of the ranks; None for a temporary one.
        seconds: Limit for all of it.

    Returns:
        See ``compare``.

    Raises:
        ranks.RankError: A rank failed or the time is up. No process is left.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="megatron_paci-") as temporary:
            return measure(run, folder=Path(temporary), seconds=seconds)
    folders = {schedule: folder / schedule for schedule in SCHEDULES}
    for each in folders.values():
        each.mkdir()
    train([run.run(*each) for each in folders.items()], folder=folder / "ranks", seconds=seconds)
    return compare(run, {name: stages_of(each) for name, each in folders.items()})


def stages_of(folder: Path) -> list[dict[str, Any]]:
    """Return the bytes of every stage of one training run."""
    records = read_records(folder)
    stages = run_figures(records)["bytes"]
    for rank, stage in enumerate(stages):
        messages = json.loads((folder / f"messages{rank}.json").read_text())
        stage |= {"messages_peak": messages["peak"], "message": messages["largest"]}
    return stages


def compare(run: MemoryRun, stages: dict[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Put PACI's stages beside those of 1F1B.

    Args:
        stages: By schedule, what ``stages_of`` returns.

    Returns:
        ``weights_ratio`` (parameters, gradients and optimizer state together) and
        ``activations_ratio``, PACI / 1F1B per stage, and the largest of each as ``..._max``;
        ``activations_limit`` per stage, the ratio of the microbatches in flight;
        ``stages`` by schedule, the bytes themselves; ``parameters`` of the comparison.
    """
    ours, theirs = stages["paci"], stages["1f1b"]

    def ratio(*parts: str) -> list[float]:
        return [
            sum(our[part] for part in parts) / sum(their[part] for part in parts)
            for our, their in zip(ours, theirs, strict=True)
        ]

    weights, activations = ratio(*WEIGHTS), ratio("activations_peak")
    return {
        "parameters": asdict(run),
        "weights_ratio_max": max(weights),
        "activations_ratio_max": max(activations),
        "weights_ratio": weights,
        "activations_ratio": activations,
        "activations_limit": [
            our / their for our, their in zip(run.in_flight("paci"), run.in_flight("1f1b"))
        ],
        "stages": {name: list(each) for name, each in stages.items()},
    }
