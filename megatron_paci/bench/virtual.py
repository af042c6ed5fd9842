"""One measurement in virtual time: its parameters, their check, and the training run they mean."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_paci.bench.costs import Costs, time
from megatron_paci.bench.ranks import run_ranks
from megatron_paci.bench.results import job_result

SCHEDULES = ("1f1b", "interleaved", "paci")
TINY_GPT = str(Path(__file__).with_name("tiny_gpt.py"))
TINY_FLAGS = (
    "--hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--vocab-size 31 --make-vocab-size-divisible-by 1 "
    "--micro-batch-size 1 --lr 1e-3 --eval-iters 0 --eval-interval 1000000 "
    "--log-interval 1 --tensorboard-log-interval 1 --seed 1"
)
# Trained after the measured iterations: at the end PACI drains, which is no steady state.
LAST_ITERATIONS = 2


@dataclass(frozen=True, kw_only=True)
class VirtualRun:
    """Parameters of one measurement; times are in the units of each other."""

    stages: int
    microbatches: int
    """Per iteration."""
    schedule: str
    replicas: int = 1
    """Data-parallel copies of the pipeline."""
    tensor: int = 1
    """Tensor-parallel size: ranks that a stage of one copy is spread over."""
    accum: int | None = None
    """PACI: backward passes per optimizer step; None for all microbatches of an iteration."""
    extra_in_flight: int = 0
    """PACI: more microbatches in flight for each link between a stage and the last one."""
    chunks: int = 2
    """Interleaved: model chunks per stage."""
    latency: str = "0"
    """Time that a message travels between stages."""
    forward_time: str = "1"
    """Of a whole stage; one number, or one per stage separated by commas, as with the next two."""
    backward_time: str = "2"
    step_time: str = "0"
    tied_embeddings: bool = False
    """Whether the first and the last stage share the word embeddings."""
    iterations: int = 20
    """Measured ones."""
    warmup: int | None = None
    """Iterations before; None for 3, or as many as it takes to fill the pipeline."""
    megatron_args: str = ""
    """More of Megatron's flags; they come last, so they win."""
    script: str = TINY_GPT
    """Launch script to train with."""

    @property
    def num_ranks(self) -> int:
        """Processes that take part."""
        return self.stages * self.replicas * self.tensor

    @property
    def warmup_iterations(self) -> int:
        """Iterations before the measured ones."""
        # The first backward of the first stage comes after as many forwards as can be in flight.
        in_flight = self.stages + self.extra_in_flight * (self.stages - 1)
        filled = -(-in_flight // max(1, self.microbatches)) + 1
        return max(3, filled) if self.warmup is None else self.warmup

    def problems(self) -> list[str]:
        """Return what is wrong with the parameters, each with its remedy; none if they can run."""
        rules = [
            (self.stages < 1, f"--stages {self.stages}: give 1 or more"),
            (self.replicas < 1, f"--replicas {self.replicas}: give 1 or more"),
            (self.tensor < 1, f"--tensor {self.tensor}: give 1 or more"),
            (self.microbatches < 1, f"--microbatches {self.microbatches}: give 1 or more"),
            (
                self.schedule not in SCHEDULES,
                f"--schedule {self.schedule}: unknown; take one of {', '.join(SCHEDULES)}",
            ),
            (self.iterations < 1, f"--iterations {self.iterations}: give 1 or more"),
            (
                self.warmup is not None and self.warmup < 0,
                f"--warmup {self.warmup}: give 0 or more, or leave it out",
            ),
            (
                self.accum is not None and self.schedule in ("1f1b", "interleaved"),
                f"--accum {self.accum}: has no meaning under --schedule {self.schedule}; drop it, "
                "or take --schedule paci",
            ),
            (
                self.extra_in_flight < 0,
                f"--extra-in-flight {self.extra_in_flight}: give 0 or more",
            ),
            (
                self.extra_in_flight > 0 and self.schedule in ("1f1b", "interleaved"),
                f"--extra-in-flight {self.extra_in_flight}: has no meaning under --schedule "
                f"{self.schedule}; drop it, or take --schedule paci",
            ),
        ]
        found = [text for broken, text in rules if broken]
        if self.accum is not None and self.microbatches >= 1:
            if self.accum < 1 or self.microbatches % self.accum:
                found.append(
                    f"--accum {self.accum}: does not divide --microbatches {self.microbatches}; "
                    f"take e.g. --accum {self.microbatches}"
                )
        if self.schedule == "interleaved":
            found += self._problems_of_interleaving()
        try:
            shlex.split(self.megatron_args)
        except ValueError as error:
            found.append(f"--megatron-args: {str(error).lower()}; check its quotes")
        return found + self._problems_of_times()

    def _problems_of_interleaving(self) -> list[str]:
        found = []
        if self.stages == 1:
            found.append("--schedule interleaved: needs more than one stage; give e.g. --stages 2")
        elif self.stages > 1 and self.microbatches % self.stages:
            found.append(
                f"--microbatches {self.microbatches}: the interleaved schedule works in groups of "
                f"as many as there are stages; give a multiple of {self.stages}"
            )
        if self.chunks < 2:
            found.append(f"--chunks {self.chunks}: interleaving needs 2 or more")
        return found

    def _problems_of_times(self) -> list[str]:
        found = []
        for name, key in (("forward", "forward"), ("backward", "backward"), ("step", "step")):
            text = getattr(self, f"{name}_time")
            try:
                Costs.parse(num_stages=max(1, self.stages), **{key: text})
            except ValueError as error:
                found.append(f"--{name}-time {text}: {error}")
        try:
            time(self.latency)
        except ValueError as error:
            found.append(f"--latency {self.latency}: {error}")
        return found

    def arguments(self, folder: Path) -> list[str]:
        """Return the command line of the training; TensorBoard files go to ``folder``."""
        chunks = self.chunks if self.schedule == "interleaved" else 1
        flags = TINY_FLAGS.split() + [
            "--num-layers", str(self.stages * chunks),
            "--pipeline-model-parallel-size", str(self.stages),
            "--tensor-model-parallel-size", str(self.tensor),
            "--global-batch-size", str(self.microbatches * self.replicas),
            "--train-iters", str(self.warmup_iterations + self.iterations + LAST_ITERATIONS),
            "--pipeline-schedule", self.schedule,
            "--tensorboard-dir", str(folder / "tensorboard"),
        ]
        if not self.tied_embeddings:
            flags.append("--untie-embeddings-and-output-weights")
        if chunks > 1:
            flags += ["--num-virtual-stages-per-pipeline-rank", str(chunks)]
        if self.schedule == "paci":
            flags += ["--paci-accum", str(self.accum or self.microbatches)]
            flags += ["--paci-extra-in-flight", str(self.extra_in_flight)]
        return flags + shlex.split(self.megatron_args)

    def for_ranks(self, folder: Path) -> dict[str, Any]:
        """Return what every rank has to know, as plain values."""
        return {
            "script": self.script,
            "arguments": self.arguments(folder),
            "num_stages": self.stages,
            "costs": {
                "forward": self.forward_time,
                "backward": self.backward_time,
                "step": self.step_time,
            },
            "latency": self.latency,
            "warmup": self.warmup_iterations,
            "iterations": self.iterations,
        }


def measure(
    runs: Sequence[VirtualRun], *, folder: Path | None = None, seconds: float = 600
) -> list[dict[str, Any]]:
    """Train ``runs``, all with the same number of ranks, on local CPU processes.

    Args:
        folder: Receives the outputs of the ranks; None for a temporary one.
        seconds: Limit for all of it.

    Returns:
        For each run what ``results.job_result`` makes of its ranks.

    Raises:
        ValueError: Parameters cannot run; the message lists why.
        ranks.RankError: A rank failed or the time is up. No process is left.
    """
    problems = [problem for run in runs for problem in run.problems()]
    if len({run.num_ranks for run in runs}) > 1:
        problems.append("runs measured together need the same number of ranks")
    if problems:
        raise ValueError("\n".join(problems))
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="megatron_paci-") as temporary:
            return measure(runs, folder=Path(temporary), seconds=seconds)
    plain = [run.for_ranks(folder / str(number)) for number, run in enumerate(runs)]
    results = run_ranks(runs[0].num_ranks, plain, folder, seconds=seconds)
    return [job_result(ranks) for ranks in results]
