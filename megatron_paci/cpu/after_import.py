"""Call a function as soon as a module has been imported.

The CPU device is installed before Megatron is imported, and cannot import it: the user's script
decides later, by ``sys.path``, which Megatron that is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """A finder that lets the others find the module, and then waits until it has been executed."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def install(self) -> None:
        """Call the function now if the module is there already, else after its import."""
        if self._name in sys.modules:
            self._then(sys.modules[self._name])
        else:
            sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        specs = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # the class's own method is back
                execute(module)
                self.uninstall()
                self._then(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
