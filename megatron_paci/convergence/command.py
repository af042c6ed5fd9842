"""Runs experiments: which runs are missing, several at a time, one line for each that ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_paci.children import python_path
from megatron_paci.convergence.experiments import Experiment
from megatron_paci.convergence.results import Results
from megatron_paci.convergence.settings import Settings
from megatron_paci.terminal import say

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Folders:
    """Where things are."""

    results: Results
    """Of runs that have ended."""

    work: Path
    """Texts, logs and states of runs that have not ended."""

    def log(self, settings: Settings) -> Path:
        """Return the file of what a run prints."""
        return self.work / f"{settings.key()}.log"


@dataclass
class Started:
    """A run that a process is training."""

    name: str
    settings: Settings
    process: subprocess.Popen
    since: float


def missing(experiments: Iterable[Experiment], folders: Folders) -> list[tuple[str, Settings]]:
    """Return the runs without a result, each once, with names for people."""
    found = {}
    for experiment in experiments:
        for label, settings in experiment.seeded():
            if folders.results.get(settings) is None:
                name = f"{experiment.name}: {label}, seed {settings.seed}"
                found.setdefault(settings, name)
    return [(name, settings) for settings, name in found.items()]


def run(runs: Sequence[tuple[str, Settings]], folders: Folders, *, jobs: int) -> list[str]:
    """Train runs, ``jobs`` at a time.

    Returns:
        The names of those that failed; their logs say why.
    """
    waiting, working, failed, done = list(runs), [], [], 0
    folders.results.folder.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or working:
            while waiting and len(working) < jobs:
                working.append(_start(*waiting.pop(0), folders))
            time.sleep(POLL_SECONDS)
            for each in [each for each in working if each.process.poll() is not None]:
                working.remove(each)
                done += 1
                result = folders.results.get(each.settings)
                if each.process.returncode or result is None:
                    failed.append(each.name)
                    outcome = f"FAILED, see {folders.log(each.settings)}"
                else:
                    outcome = _outcome(result)
                minutes = (time.monotonic() - each.since) / 60
                say(f"[{done}/{len(runs)}] {each.name}: {outcome} ({minutes:.1f} min)")
    finally:
        for each in working:
            each.process.kill()
            each.process.wait()
    return failed


def _outcome(result: dict) -> str:
    if result["diverged"] is not None:
        return f"diverged at iteration {result['diverged']}"
    return f"validation loss {result['validation'][-1][1]:.4f}"


def _start(name: str, settings: Settings, folders: Folders) -> Started:
    key = settings.key()
    order = folders.work / f"{key}.run.json"
    order.write_text(json.dumps({
        "settings": asdict(settings),
        "train": str(folders.work / "train.txt"),
        "validation": str(folders.work / "validation.txt"),
        "state": str(folders.work / f"{key}.pt"),
        "result": str(folders.results.path(settings)),
        "ends_with_parent": True,
    }))
    with folders.log(settings).open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_paci.convergence.training", str(order)],
            # Closed when this process ends, in whatever way.
            stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        )
    return Started(name, settings, process, time.monotonic())
