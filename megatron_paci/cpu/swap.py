"""Replace attributes of modules and classes, and put every one of them back by identity.

A name is often bound in several places: ``from torch.cuda import current_device`` gives the
importing module a binding of its own, which replacing ``torch.cuda.current_device`` does not reach.
So after the owners have been changed, ``rebind`` follows the old objects into every loaded module,
and ``undo`` follows the new ones back: also into modules that were first imported in between.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple


class Swap(NamedTuple):
    """One replaced attribute; ``own`` tells whether the owner had it itself or inherited it."""

    owner: Any
    name: str
    own: bool
    old: Any
    new: Any


class Swaps:
    """Replaced attributes that can be undone exactly."""

    def __init__(self) -> None:
        self._done: list[Swap] = []

    def __len__(self) -> int:
        return len(self._done)

    def set(self, owner: Any, name: str, new: Any) -> None:
        """Replace ``owner.name``; an inherited attribute is shadowed and later unshadowed."""
        own = name in vars(owner)
        # The raw entry, not getattr: a staticmethod or property has to come back as it was.
        old = vars(owner)[name] if own else getattr(owner, name)
        setattr(owner, name, new)
        self._done.append(Swap(owner, name, own, old, new))

    def rebind(self) -> None:
        """Replace the copies that other modules hold of everything replaced so far."""
        _rebind([(swap.old, swap.new) for swap in self._done])

    def replaced_since(self) -> list[str]:
        """Names that somebody else has replaced after us, so that undoing would lose their work."""
        return [
            f"{owner.__name__}.{name}"
            for owner, name, _, _, new in self._done
            if vars(owner).get(name) is not new
        ]

    def undo(self) -> None:
        """Put everything back, the last replacement first, and then its copies."""
        pairs = [(swap.new, swap.old) for swap in self._done]
        while self._done:
            owner, name, own, old, _ = self._done.pop()
            if own:
                setattr(owner, name, old)
            else:
                delattr(owner, name)
        _rebind(pairs)


def _rebind(pairs: list[tuple[Any, Any]]) -> None:
    """Replace every module-level binding of a first object by the second.

    Only functions and classes: a constant is shared by names that have nothing in common.
    """
    wanted = {id(old): new for old, new in pairs if callable(old)}
    for module_name, module in list(sys.modules.items()):
        # Our own modules hold the stand-ins under their own names.
        if not issubclass(type(module), ModuleType) or module_name.startswith(__package__):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in wanted:
                setattr(module, name, wanted[id(value)])
