"""Patches as records: installed all or nothing, removed exactly.

A patch names a function or a method by dotted path, says why it is wrapped and which parameters it
is expected to have. Installing replaces the function wherever a loaded module holds that very
object, under whatever name (``from x import f`` makes such copies); removing puts the original
back in all those places and in modules that picked the wrapper up later.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType


class PatchError(RuntimeError):
    """A function to be patched is missing, changed, or already replaced."""


@dataclass(frozen=True)
class Patch:
    """One function of the host framework and the wrapper that goes around it."""

    target: str
    """Where it is defined: ``package.module:function`` or ``package.module:Class.method``."""

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
        self._replaced: list[_Replaced] = []

    @property
    def installed(self) -> bool:
        """Whether the patches are in place."""
        return bool(self._replaced)

    def problems(self) -> list[str]:
        """Return one line per patch that does not fit the host framework; changes nothing."""
        problems = []
        for patch in self.patches:
            try:
                _resolve(patch)
            except PatchError as error:
                problems.append(f"- {patch.target}: {error}")
        return problems

    def install(self) -> None:
        """Put every wrapper in place.

        Raises:
            PatchError: A target is missing or its signature is not the expected one, or the set
                is installed already. Nothing is changed then; the message lists every problem.
        """
        if self.installed:
            raise PatchError("the patches are installed already")
        if problems := self.problems():
            raise PatchError("cannot patch this version:\n" + "\n".join(problems))
        replaced = [_resolve(patch) for patch in self.patches]
        _swap((item.owner, item.name, item.original, item.wrapped) for item in replaced)
        self._replaced = replaced

    def uninstall(self) -> None:
        """Put every original back, by identity. Without effect if not installed.

        Raises:
            PatchError: Somebody else has replaced one of the wrappers since; nothing is changed.
        """
        problems = [
            f"- {patch.target} was replaced again by {item.current!r}"
            for patch, item in zip(self.patches, self._replaced)
            if item.current is not item.wrapped
        ]
        if problems:
            raise PatchError("cannot uninstall, undo these first:\n" + "\n".join(problems))
        _swap((item.owner, item.name, item.wrapped, item.original) for item in self._replaced)
        self._replaced = []


@dataclass(frozen=True)
class _Replaced:
    """A target that was found, and what goes in its place."""

    owner: ModuleType | type
    name: str
    original: Callable
    wrapped: Callable

    @property
    def current(self) -> Callable | None:
        return vars(self.owner).get(self.name)


def _resolve(patch: Patch) -> _Replaced:
    """Find the function to patch.

    Raises:
        PatchError: It is missing or has other parameters than expected.
    """
    module_name, path = patch.target.split(":")
    *classes, name = path.split(".")
    try:
        owner = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise PatchError(str(error)) from error
    for class_name in classes:
        owner = getattr(owner, class_name, None)
    original = getattr(owner, "__dict__", {}).get(name)
    if not callable(original):
        raise PatchError("there is no such function")
    found = tuple(inspect.signature(original).parameters)
    if found[: len(patch.parameters)] != patch.parameters:
        raise PatchError(
            f"expected parameters ({', '.join(patch.parameters)}, ...), found ({', '.join(found)})"
        )
    return _Replaced(owner, name, original, _wrap(patch.wrapper, original))


def _wrap(wrapper: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def patched(*args, **kwargs):
        return wrapper(original, *args, **kwargs)

    return patched


def _swap(changes: Iterable[tuple[ModuleType | type, str, Callable, Callable]]) -> None:
    """Replace methods where they are, and functions in every loaded module that holds them."""
    functions: dict[int, Callable] = {}
    kinds: set[type] = set()  # a quick look at the type spares most values a slow one
    for owner, name, old, new in changes:
        if isinstance(owner, type):
            setattr(owner, name, new)
        else:
            functions[id(old)] = new
            kinds.add(type(old))
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if not isinstance(namespace, dict):
            continue
        for name, value in list(namespace.items()):
            if type(value) in kinds and (new := functions.get(id(value))) is not None:
                namespace[name] = new
