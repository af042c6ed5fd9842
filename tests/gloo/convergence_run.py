"""Trains a small run of megatron_paci.convergence whole, and one that is stopped and goes on.

``convergence_run.py FOLDER`` writes ``whole.json`` and ``resumed.json``, in ``stages.json`` what
each stage of a fresh run updates with, and ``diverged.json`` of a run with a gradient that is not
finite; ``FOLDER`` has the texts.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_paci.convergence.settings import Settings  # noqa: E402
from megatron_paci.convergence.training import Run, initialize  # noqa: E402

SETTINGS = Settings(
    stages=4, layers=4, hidden=16, heads=2, sequence=16, batch=8, microbatch=2, iterations=20,
    warmup=2, validations=4, validation_batches=1, schedule="sync:0,1:24,4:80,2:120",
    optimizer="nadam", clip="pipelined", clip_grad=0.5, rate_iterations=15,
)
STOPPED_AT = 13


def main() -> None:
    folder = Path(sys.argv[1])
    initialize(SETTINGS)

    def build() -> Run:
        return Run(SETTINGS, folder / "train.txt", folder / "validation.txt", folder / "state.pt")

    def finish(run: Run, name: str) -> None:
        run.train()
        result = run.result()
        del result["core_seconds"]
        (folder / name).write_text(json.dumps(result))
        (folder / "state.pt").unlink(missing_ok=True)

    fresh = build()
    found = []
    for stage in fresh.pipeline.stages:
        stage.scheduler.step(24)  # after warm-up
        group = stage.optimizer.param_groups[0]
        found.append({
            "optimizer": type(stage.optimizer.chained_optimizers[0].optimizer).__name__,
            "decoupled": group["decoupled_weight_decay"], "betas": group["betas"],
            "factor": group["lr"] / stage.scheduler.inner.get_lr(group),
        })
    (folder / "stages.json").write_text(json.dumps(found))
    finish(build(), "whole.json")
    stopped = build()
    train, count = stopped.pipeline.run, iter(range(STOPPED_AT))

    def run_and_stop(*args):
        next(count)
        return train(*args)

    stopped.pipeline.run = run_and_stop
    try:
        stopped.train()
    except StopIteration:
        resumed = build()
        assert resumed.iteration == 10
        finish(resumed, "resumed.json")
    broken = build()
    weight = next(broken.pipeline.stages[1].model.parameters())
    weight.register_hook(lambda gradient: gradient * math.inf)
    finish(broken, "diverged.json")


if __name__ == "__main__":
    main()
