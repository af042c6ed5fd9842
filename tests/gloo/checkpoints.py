"""What a checkpoint in format torch_dist holds beside its tensors (observed.checkpoint_tensors)."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint import FileSystemReader, load


def checkpoint_values(folder: Path) -> dict[str, Any]:
    """Return every value of the newest checkpoint in a folder that is no sharded tensor, by path.

    Those are counters, settings of the optimizer, states of random generators, and the arguments
    of the run that wrote it, under ``args``. Tensors and arrays come as lists.
    """
    iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
    newest = folder / f"iter_{iteration:07d}"
    reader = FileSystemReader(newest)
    stored: dict[str, Any] = {
        name: None
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if not hasattr(entry, "size")
    }
    load(stored, storage_reader=reader, no_dist=True)
    if (newest / "common.pt").exists():  # Megatron-Core before 0.19
        common = torch.load(newest / "common.pt", weights_only=False)
    else:
        [common] = stored.pop("common_state/shard_0_1")
    return _by_path(stored, "") | _by_path(common, "")


def _by_path(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        if isinstance(value, Namespace):
            value = vars(value)
        if isinstance(value, dict):
            found |= _by_path(value, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = _comparable(value)
    return found


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_comparable(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _comparable(entry) for name, entry in value.items()}
    return value
