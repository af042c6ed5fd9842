"""Runs of observed_gpt.py, and what they leave behind: observations, checkpoints, output."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load

from tests.gloo.launch import TINY_GPT, flags, launch
from tests.gloo.scenarios import TIED

SCRIPT = "tests/gloo/observed_gpt.py"
PACI = "--pipeline-schedule paci --paci-accum"
SHARDED = "--use-distributed-optimizer"


class Launches:
    """Collects scenarios, runs them in one launch and keeps what they have written."""

    def __init__(self, num_ranks: int, folder: Path):
        self.num_ranks, self.folder = num_ranks, folder
        self._scenarios: dict[str, dict] = {}

    def add(self, name: str, extra: str, base: str = TINY_GPT, *, stages: int = 0, **parameters):
        observe = f"--observe {self.folder / name}"
        self._scenarios[name] = {
            "script": SCRIPT,
            "arguments": flags(stages or self.num_ranks, f"{extra} {observe}", base),
            "plugin": "--pipeline-schedule" in extra,
            **parameters,
        }

    def run(self, seconds: float) -> dict[str, list[dict]]:
        """Return by name, for each rank, what worker.py and observed_gpt.py have seen."""
        runs = launch(self.num_ranks, self._scenarios, self.folder, seconds=seconds, fresh=True)
        for name, ranks in runs.items():
            for rank, seen in enumerate(ranks):
                observed = json.loads((self.folder / f"{name}.rank{rank}.json").read_text())
                seen["iteration_losses"] = seen["losses"]
                seen |= observed
        return runs


def add_tied(launches: Launches, loaded: str) -> None:
    """Train, drain and save with tied weights; then evaluate one of them under 1F1B."""
    for name, extra in (("tied", ""), ("tied-sharded", SHARDED)):
        folder = launches.folder / f"checkpoint-{name}"
        common = f"{extra} --eval-interval 2 --eval-iters 1"
        launches.add(name, f"{common} {PACI} 4 --save {folder} --save-interval 4", TIED)
        if name == loaded:
            launches.add("loaded", f"{common} --load {folder} --no-load-optim", TIED)


def add_slowed(launches: Launches) -> None:
    """The same training three times, with other random sleeps on every stage."""
    for seed in range(3):
        launches.add(
            f"slowed-{seed}",
            f"{PACI} 2 --num-layers {launches.num_ranks} --global-batch-size 8 --eval-iters 0",
            sleep_ms=20, sleep_seed=seed,
        )


def checkpoint_tensors(folder: Path, iteration: int | None = None) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, the newest by default, in format torch_dist."""
    if iteration is None:
        iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
    reader = FileSystemReader(folder / f"iter_{iteration:07d}")
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def output(folder: Path, rank: int, scenario: str) -> str:
    """Return what a rank has printed during one scenario."""
    text = (folder / f"rank{rank}.log").read_text()
    return text.split(f"=== {scenario}\n")[1].split("\n=== ")[0]
