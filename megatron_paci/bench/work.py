"""The handle of an asynchronous operation that moves the clock when it is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ClockedWork:
    """A ``torch.distributed.Work`` whose first ``wait`` also moves the clock."""

    def __init__(self, work: Any, effects: list[Callable[[], None]]):
        """Keep references.

        Args:
            work: The original; None for one that only moves the clock.
            effects: Called after the first wait.
        """
        self._work = work
        self._effects = effects

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait like the original."""
        result = True if self._work is None else self._work.wait(*args, **kwargs)
        self._move_clock()
        return result

    def synchronize(self) -> None:
        """Synchronize like the original; a wait by another name."""
        if self._work is not None:
            self._work.synchronize()
        self._move_clock()

    def _move_clock(self) -> None:
        effects, self._effects = self._effects, []
        for effect in effects:
            effect()

    @property
    def __class__(self) -> type:  # so that isinstance answers as for the original
        return ClockedWork if self._work is None else type(self._work)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
