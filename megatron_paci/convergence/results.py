"""The results of runs that have ended: one small JSON file each, kept with the project."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from megatron_paci.convergence.experiments import Experiment
from megatron_paci.convergence.settings import Settings


class Results:
    """The results in a folder."""

    def __init__(self, folder: Path):
        """Read files as they are asked for."""
        self.folder = folder

    def path(self, settings: Settings) -> Path:
        """Return the file of a run."""
        return self.folder / f"{settings.key()}.json"

    def get(self, settings: Settings) -> dict[str, Any] | None:
        """Return the result of a run, None if it has not ended.

        Raises:
            ValueError: A default of ``Settings`` was another one when the run was trained. Fields
                that came later are taken to have had no effect before.
        """
        path = self.path(settings)
        if not path.exists():
            return None
        result = json.loads(path.read_text())
        now = asdict(settings)
        if wrong := [name for name, value in result["settings"].items() if now[name] != value]:
            raise ValueError(
                f"{path} was trained with another {', '.join(wrong)}: give the default back, or "
                "remove the file"
            )
        return result

    def of(self, experiment: Experiment, label: str) -> dict[int, dict[str, Any]]:
        """Return the results of a run by seed, of those seeds that have ended."""
        found = {
            settings.seed: self.get(settings)
            for name, settings in experiment.seeded() if name == label
        }
        return {seed: result for seed, result in found.items() if result is not None}


def final(result: dict[str, Any]) -> float:
    """Return the validation loss at the end; not a number if the run has diverged."""
    return math.nan if result["diverged"] is not None else result["validation"][-1][1]


def final_training(result: dict[str, Any]) -> float:
    """Return the mean training loss of the last tenth of a run."""
    losses = result["losses"]
    return mean(losses[-max(1, len(losses) // 10):])
