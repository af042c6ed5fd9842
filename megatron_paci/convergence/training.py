"""Trains one run of an experiment: ``python -m megatron_paci.convergence.training RUN.json``.

``RUN.json`` holds ``settings`` (fields of ``Settings``), the paths ``train`` and ``validation`` of
the texts, ``state`` and ``result``, paths to write, and ``ends_with_parent`` if this process is to
end when its standard input is closed. The state is written at every validation, where the pipeline
is drained; a run that was ended goes on from there and gives the same numbers, to the last bit.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from megatron_paci.accumulation import SYNC
from megatron_paci.bench.rank import end_with_parent
from megatron_paci.convergence.settings import Settings
from megatron_paci.cpu import CpuDevice, cpu_environment, cpu_flags
from megatron_paci.plots import running_mean
from megatron_paci.version import versions

# An iteration whose loss is above this, twice that of a guess, ends a run: it has diverged.
DIVERGED = 2 * math.log(256)
# Half the iterations over which losses are averaged, for their deviation from that mean.
HALF_WIDTH = 12


def initialize(settings: Settings) -> None:
    """Make this process a Megatron job of one rank on the CPU."""
    os.environ.update(cpu_environment(os.environ))
    CpuDevice().install()
    import torch

    torch.set_num_threads(1)
    # A store in memory needs no port.
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    from megatron.core import parallel_state
    from megatron.training.arguments import parse_and_validate_args

    flags = settings.megatron_flags()
    sys.argv = [sys.argv[0], *flags, *cpu_flags(flags)]
    parse_and_validate_args()
    parallel_state.initialize_model_parallel()


class Run:
    """One run, from the start or from a saved state.

    Attributes:
        pipeline: What is trained.
        iteration: How many iterations are done.
    """

    def __init__(self, settings: Settings, train: Path, validation: Path, state: Path):
        """Build the pipeline and load the state if there is one."""
        import torch

        from megatron_paci.convergence.data import Text
        from megatron_paci.convergence.pipeline import LocalPipeline
        from megatron_paci.convergence.stage import Variant

        self._settings = settings
        self._texts = Text(train, settings.sequence), Text(validation, settings.sequence)
        self._state_path = state
        latest = settings.accumulation_at(settings.iterations - 1)
        self.pipeline = LocalPipeline(
            settings.stages, accumulation=latest or settings.num_microbatches,
            clip="pipelined" if settings.clip == "none" else settings.clip,
            variant=Variant(
                stash=settings.stash, nadam=settings.optimizer == "nadam",
                rate_samples=settings.rate_iterations * settings.batch,
            ),
        )
        self.iteration = 0
        self._losses: list[float] = []  # by microbatch
        self._validation: list[tuple[int, float]] = []
        self._seconds = 0.0
        self._earlier = {"drift_max": 0, "skipped": 0}  # before this process
        if state.exists():
            saved = torch.load(state, weights_only=False)
            self.pipeline.load_state_dict(saved["pipeline"])
            self.iteration, self._losses = saved["iteration"], saved["losses"]
            self._validation, self._seconds = saved["validation"], saved["seconds"]
            self._earlier = saved["counts"]

    def train(self) -> None:
        """Train to the end, or until the run has diverged."""
        from megatron_paci.convergence.data import forward_step, microbatches, shuffled

        settings, pipeline = self._settings, self.pipeline
        size = settings.num_microbatches
        samples = shuffled(
            self._texts[0].num_sequences, settings.seed, self.iteration * settings.batch
        )
        data = microbatches(self._texts[0], samples, settings.microbatch, settings.stages)
        interval = settings.iterations // settings.validations
        start, current = time.process_time(), None
        while self.iteration < settings.iterations and not self.diverged:
            accumulation = settings.accumulation_at(self.iteration)
            if accumulation != current:
                self._note(pipeline.drain())
                pipeline.joint = accumulation == SYNC
                pipeline.set_accumulation(accumulation or size)
                current = accumulation
            self._note(pipeline.run(forward_step, data, size))
            self.iteration += 1
            validates = self.iteration % interval == 0
            if accumulation == SYNC or validates:
                self._note(pipeline.drain())
            if validates:
                self._validation.append((self.iteration, self._validate()))
                self._seconds += time.process_time() - start
                start = time.process_time()
                self._save()
        self._seconds += time.process_time() - start

    @property
    def losses(self) -> list[float]:
        """The mean loss of every iteration that is complete."""
        size = self._settings.num_microbatches
        whole = len(self._losses) // size * size
        return [sum(self._losses[i:i + size]) / size for i in range(0, whole, size)]

    @property
    def diverged(self) -> bool:
        """Whether the loss of the last iteration says so, or a gradient that was not finite."""
        newest = self._losses[-self._settings.num_microbatches:]
        too_high = bool(newest) and not sum(newest) / len(newest) < DIVERGED
        return too_high or self._counts()["skipped"] > 0

    def result(self) -> dict[str, Any]:
        """Return what is kept of a run that has ended."""
        losses = self.losses
        half = losses[len(losses) // 2:]
        smooth = running_mean(half, half_width=HALF_WIDTH)
        squares = [(loss - mean) ** 2 for loss, mean in zip(half, smooth)]
        group = -(-len(losses) // 200)
        return {
            "settings": dataclasses.asdict(self._settings),
            "diverged": self.iteration if self.diverged else None,
            "iterations_per_loss": group,
            "losses": [
                round(sum(part) / len(part), 4)
                for part in (losses[i:i + group] for i in range(0, len(losses), group))
            ],
            "validation": [[i, round(value, 5)] for i, value in self._validation],
            "deviation": round(math.sqrt(sum(squares) / len(squares)), 6),
            **self._counts(),
            "parameters": sum(
                parameter.numel() for stage in self.pipeline.stages
                for parameter in stage.model.parameters()
            ),
            "core_seconds": round(self._seconds, 1),
            "text": {name: text.digest[:16]
                     for name, text in zip(("train", "validation"), self._texts)},
            "versions": versions(),
        }

    def _counts(self) -> dict[str, int]:
        """Return the largest drift and the windows skipped, over the whole run."""
        stages = self.pipeline.stages
        drift = max(stage.engine.statistics()["drift_max"] for stage in stages)
        return {
            "drift_max": max(self._earlier["drift_max"], drift),
            "skipped": self._earlier["skipped"] + sum(stage.window.skipped for stage in stages),
        }

    def _note(self, entries: list[dict[str, Any]]) -> None:
        self._losses += [float(each["lm loss"][0] / each["lm loss"][1]) for each in entries]

    def _validate(self) -> float:
        """Return the loss over the same sequences every time, spread over the validation text."""
        from megatron_paci.convergence.data import forward_step, mean_loss, microbatches

        settings, text = self._settings, self._texts[1]
        count = min(settings.validation_batches * settings.batch, text.num_sequences)
        numbers = [i * text.num_sequences // count for i in range(count)]
        # The size of these microbatches is one for all runs: the loss then depends on it in no bit.
        data = microbatches(text, iter(numbers), settings.batch, settings.stages)
        batches = count // settings.batch
        return mean_loss(self.pipeline.evaluate(forward_step, data, batches))

    def _save(self) -> None:
        """Write the state, whole at once."""
        import torch

        unfinished = self._state_path.with_suffix(".unfinished")
        torch.save({
            "pipeline": self.pipeline.state_dict(), "iteration": self.iteration,
            "losses": self._losses, "validation": self._validation, "seconds": self._seconds,
            "counts": self._counts(),
        }, unfinished)
        unfinished.rename(self._state_path)


def main() -> None:
    """Train what the command line names, and write the result, whole at once."""
    run = json.loads(Path(sys.argv[1]).read_text())
    if run.get("ends_with_parent"):
        end_with_parent()
    settings = Settings(**run["settings"])
    initialize(settings)
    paths = {name: Path(run[name]) for name in ("train", "validation", "state")}
    training = Run(settings, **paths)
    training.train()
    result = Path(run["result"])
    unfinished = result.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(training.result()) + "\n")
    unfinished.rename(result)
    paths["state"].unlink(missing_ok=True)


if __name__ == "__main__":
    main()
