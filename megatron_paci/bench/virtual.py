"""One measurement in virtual time: its parameters, their check, and the training run they mean."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from megatron_paci.bench.costs import Costs, time
from megatron_paci.bench.ranks import run_ranks
from megatron_paci.bench.results import job_result
from megatron_paci.bench.training_run import TrainingRun
from megatron_paci.simulate import timing as simulator
from megatron_paci.simulate.figures import Memory
from megatron_paci.simulate.figures import measure as simulated
from megatron_paci.simulate.schedules import plan

TINY_MODEL = (
    "--hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--vocab-size 31 --make-vocab-size-divisible-by 1 "
    "--micro-batch-size 1 --lr 1e-3 --eval-iters 0 --eval-interval 1000000 --seed 1"
)


@dataclass(frozen=True, kw_only=True)
class VirtualRun(TrainingRun):
    """Parameters of one measurement; times are in the units of each other."""

    replicas: int = 1
    """Data-parallel copies of the pipeline."""
    tensor: int = 1
    """Tensor-parallel size: ranks that a stage of one copy is spread over."""
    latency: str = "0"
    """Time that a message travels between stages."""
    forward_time: str = "1"
    """Of a whole stage; one number, or one per stage separated by commas, as with the next two."""
    backward_time: str = "2"
    step_time: str = "0"
    tied_embeddings: bool = False
    """Whether the first and the last stage share the word embeddings."""

    @property
    def num_ranks(self) -> int:
        """Processes that take part."""
        return self.stages * self.replicas * self.tensor

    def problems(self) -> list[str]:
        """Return what is wrong with the parameters, each with its remedy; none if they can run."""
        sizes = [
            f"--{name} {value}: give 1 or more"
            for name, value in (("replicas", self.replicas), ("tensor", self.tensor))
            if value < 1
        ]
        return super().problems() + sizes + self._problems_of_times()

    def _problems_of_times(self) -> list[str]:
        found = []
        for name in ("forward", "backward", "step"):
            text = getattr(self, f"{name}_time")
            try:
                Costs.parse(num_stages=max(1, self.stages), **{name: text})
            except ValueError as error:
                found.append(f"--{name}-time {text}: {error}")
        try:
            time(self.latency)
        except ValueError as error:
            found.append(f"--latency {self.latency}: {error}")
        return found

    def model_flags(self) -> list[str]:
        """Return Megatron's flags for the model and its data."""
        flags = TINY_MODEL.split() + [
            "--num-layers", str(self.stages * self.num_chunks),
            "--tensor-model-parallel-size", str(self.tensor),
            "--global-batch-size", str(self.microbatches * self.replicas),
        ]
        if not self.tied_embeddings:
            flags.append("--untie-embeddings-and-output-weights")
        return flags

    def more_flags(self, folder: Path) -> list[str]:
        """Return the flags for logs: all there are, in every iteration."""
        return ["--log-interval", "1", "--tensorboard-log-interval", "1",
                "--tensorboard-dir", str(folder / "tensorboard")]

    def for_ranks(self, folder: Path) -> dict[str, Any]:
        """Return what every rank has to know, as plain values."""
        return {
            "measurement": "virtual",
            "script": self.script,
            "arguments": self.arguments(folder),
            "num_stages": self.stages,
            "costs": {
                "forward": self.forward_time,
                "backward": self.backward_time,
                "step": self.step_time,
            },
            "latency": self.latency,
            "result": {"warmup": self.warmup_iterations, "iterations": self.iterations},
        }


def simulate(run: VirtualRun) -> dict[str, Any]:
    """Return ``utilization`` per stage as the simulator has it, from the same orders, exactly.

    It knows passes, messages and steps, and nothing of what else a training loop does.
    """
    costs = Costs.parse(
        num_stages=run.stages, forward=run.forward_time, backward=run.backward_time,
        step=run.step_time,
    )
    whole = [Fraction(0)] * run.stages  # a backward is never split here
    figures = simulated(
        lambda iterations: plan(
            run.schedule, run.stages, run.microbatches, iterations=iterations,
            accumulation=run.accum, chunks=run.chunks, extra_in_flight=run.extra_in_flight,
        ),
        simulator.Costs(costs.forward, costs.backward, whole, costs.step, time(run.latency)),
        Memory.in_microbatches(run.stages),
    )
    return {"utilization": [float(share) for share in figures.utilization]}


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
