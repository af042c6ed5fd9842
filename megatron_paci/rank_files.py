"""The files that the ranks of a run leave in a folder, one each: ``rank<r>.<suffix>``."""

from __future__ import annotations

import re
from pathlib import Path


def rank_files(directory: Path, suffix: str) -> dict[int, Path]:
    """Return the files of a folder by rank, in rank order; empty if there are none."""
    found = {}
    for path in Path(directory).glob(f"rank*.{suffix}"):
        if match := re.fullmatch(r"rank(\d+)", path.stem):
            found[int(match[1])] = path
    return dict(sorted(found.items()))
