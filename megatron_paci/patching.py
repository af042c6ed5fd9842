"""Patches as records: installed all or nothing, removed exactly.

A patch names a function by dotted path, says why it is wrapped and which parameters the function
is expected to have. Installing replaces the function wherever a loaded module holds that very
object, under whatever name (``from x import f`` makes such copies); removing puts the original
back in all those places and in modules that picked the wrapper up later.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class PatchError(RuntimeError):
    """A function to be patched is missing, changed, or already replaced."""


@dataclass(frozen=True)
class Patch:
    """One function of the host framework and the wrapper that goes around it."""

    target: str
    """Where the function is defined: ``package.module:function``."""

    wrapper: Callable
    """Called as ``wrapper(original, *args, **kwargs)``."""

    parameters: tuple[str, ...]
    """Leading parameter names the original must have; more may follow in newer versions."""

    why: str
    """One line for the reader of the list of patches."""


class PatchSet:
    """Patches that are installed and removed together."""

    def __init__(self, patches: Sequence[Patch]):
        self.patches = tuple(patches)
        self._replaced: list[tuple[Callable, Callable]] = []

    @property
    def installed(self) -> bool:
        """Whether the patches are in place."""
        return bool(self._replaced)

    def install(self) -> None:
        """Put every wrapper in place.

        Raises:
            PatchError: A target is missing or its signature is not the expected one, or the set
                is installed already. Nothing is changed then; the message lists every problem.
        """
        if self.installed:
            raise PatchError("the patches are installed already")
        problems: list[str] = []
        pairs = []
        for patch in self.patches:
            original, problem = _resolve(patch)
            if problem:
                problems.append(problem)
            else:
                pairs.append((original, _wrap(patch.wrapper, original)))
        if problems:
            raise PatchError("cannot patch this version:\n" + "\n".join(problems))
        _rebind({id(original): wrapped for original, wrapped in pairs})
        self._replaced = pairs

    def uninstall(self) -> None:
        """Put every original back, by identity. Without effect if not installed.

        Raises:
            PatchError: Somebody else has replaced one of the wrappers since; nothing is changed.
        """
        problems = []
        for patch, (_, wrapped) in zip(self.patches, self._replaced):
            module, name = patch.target.split(":")
            current = getattr(sys.modules[module], name, None)
            if current is not wrapped:
                problems.append(f"- {patch.target} was replaced again by {current!r}")
        if problems:
            raise PatchError("cannot uninstall, undo these first:\n" + "\n".join(problems))
        _rebind({id(wrapped): original for original, wrapped in self._replaced})
        self._replaced = []


def _resolve(patch: Patch) -> tuple[Callable | None, str | None]:
    """Return the function to patch, or a line that says what is wrong with it."""
    module_name, name = patch.target.split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        return None, f"- {patch.target}: {error}"
    original = getattr(module, name, None)
    if not callable(original):
        return None, f"- {patch.target}: there is no such function"
    found = tuple(inspect.signature(original).parameters)
    if found[: len(patch.parameters)] != patch.parameters:
        return None, (
            f"- {patch.target}: expected parameters ({', '.join(patch.parameters)}, ...), "
            f"found ({', '.join(found)})"
        )
    return original, None


def _wrap(wrapper: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def patched(*args, **kwargs):
        return wrapper(original, *args, **kwargs)

    return patched


def _rebind(replacement: dict[int, Callable]) -> None:
    """Replace, in every loaded module, each global whose ``id`` is a key of ``replacement``."""
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if not isinstance(namespace, dict):
            continue
        for name, value in list(namespace.items()):
            new = replacement.get(id(value))
            if new is not None:
                namespace[name] = new
