"""Finds Megatron's compiled data-index helper, which its training loop insists on building.

``megatron.training`` runs ``make`` in the folder of ``megatron.core.datasets`` at every start. The
wheel ships the helper built but no Makefile, so that call fails where nothing is to be done; a
source checkout has the Makefile, which needs pybind11 and builds for the ``python3`` on the PATH.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_MODULE = "megatron.core.datasets.helpers_cpp"


def ensure_helpers(build: Callable[[], None]) -> None:
    """Make the helper importable; call ``build`` only if no built one is found.

    Takes the one beside the ``megatron.core`` in use, else one of an installed wheel (same source,
    built for this interpreter; a warning says so).
    """
    if _MODULE in sys.modules or importlib.util.find_spec(_MODULE) is not None:
        return
    name = "helpers_cpp" + sysconfig.get_config_var("EXT_SUFFIX")
    for folder in sys.path:
        candidate = Path(folder, *_MODULE.split(".")[:-1], name)
        if candidate.is_file():
            logger.warning(
                "this Megatron has no compiled data-index helper; taking %s instead", candidate
            )
            spec = importlib.util.spec_from_file_location(_MODULE, candidate)
            sys.modules[_MODULE] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[_MODULE])
            return
    build()
