"""The version of megatron_paci; setup.py reads it from here without importing the package."""

import platform
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Return the versions of what a run depends on."""
    found = {"megatron_paci": __version__, "python": platform.python_version()}
    for name in ("torch", "megatron-core"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # e.g. a source tree on the path
            found[name] = "unknown"
    return found
