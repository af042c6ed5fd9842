"""What the benchmarks train: a GPT under one schedule, for a number of iterations."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from megatron_paci.bench.theory import SCHEDULES

TINY_GPT = str(Path(__file__).with_name("tiny_gpt.py"))
# Trained after the measured iterations: at the end PACI drains, which is no steady state.
LAST_ITERATIONS = 2


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Parameters of one training run."""

    stages: int
    microbatches: int
    """Per iteration."""
    schedule: str
    accum: int | None = None
    """PACI: backward passes per optimizer step; None for all microbatches of an iteration."""
    chunks: int = 2
    """Interleaved: model chunks per stage."""
    extra_in_flight: int = 0
    """PACI: more microbatches in flight, so many for each link between a stage and the last one."""
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
        return self.stages

    @property
    def warmup_iterations(self) -> int:
        """Iterations before the measured ones."""
        # The first backward of the first stage comes after one forward per microbatch in flight.
        in_flight = self.stages + self.extra_in_flight * (self.stages - 1)
        filled = -(-in_flight // max(1, self.microbatches)) + 1
        return max(3, filled) if self.warmup is None else self.warmup

    @property
    def num_chunks(self) -> int:
        """Model chunks per stage."""
        return self.chunks if self.schedule == "interleaved" else 1

    def problems(self) -> list[str]:
        """Return what is wrong with the parameters, each with its remedy; none if they can run."""
        rules = [
            (self.stages < 1, f"--stages {self.stages}: give 1 or more"),
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
        return found

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

    def arguments(self, folder: Path) -> list[str]:
        """Return the command line of the training; what it writes goes to ``folder``."""
        flags = [
            *self.model_flags(),
            "--pipeline-model-parallel-size", str(self.stages),
            "--train-iters", str(self.warmup_iterations + self.iterations + LAST_ITERATIONS),
            "--pipeline-schedule", self.schedule,
            *self.more_flags(folder),
        ]
        if self.num_chunks > 1:
            flags += ["--num-virtual-stages-per-pipeline-rank", str(self.num_chunks)]
        if self.schedule == "paci":
            flags += ["--paci-accum", str(self.accum or self.microbatches)]
            if self.extra_in_flight:
                flags += ["--paci-extra-in-flight", str(self.extra_in_flight)]
        return flags + shlex.split(self.megatron_args)

    def model_flags(self) -> list[str]:
        """Return Megatron's flags for the model and its data."""
        raise NotImplementedError

    def more_flags(self, folder: Path) -> list[str]:
        """Return the flags that remain."""
        raise NotImplementedError
