"""Child processes that import this package wherever it lies. Pure."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE_PARENT = Path(__file__).resolve().parents[1]


def python_path() -> str:
    """Return the value of ``PYTHONPATH`` for a child: this package first, then what is set."""
    return os.pathsep.join([str(PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])])
