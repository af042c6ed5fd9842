"""When one rank did what: spans of time, collected at no wait and read when they are over.

On a GPU the host runs ahead of the device, so times are taken by events on the current stream; they
are known once the device has come that far.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol


class Clock(Protocol):
    """Takes marks in time without waiting."""

    def mark(self) -> Any:
        """Return a mark for now."""

    def is_over(self, mark: Any) -> bool:
        """Whether the time of ``mark`` is known."""

    def seconds(self, mark: Any) -> float:
        """Return the seconds from the clock's start to ``mark``; waits until it is over."""


class HostClock:
    """The time of the host, where it computes itself."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._start = now()

    def mark(self) -> float:
        """Return a mark for now."""
        return self._now()

    def is_over(self, mark: float) -> bool:
        """Return True: host time is known at once."""
        return True

    def seconds(self, mark: float) -> float:
        """Return the seconds from the clock's start to ``mark``."""
        return mark - self._start


@dataclass(slots=True)
class Span:
    """Something that took time on this rank."""

    kind: str
    """``F``, ``B`` or ``STEP`` for the actions of the schedule; else a word, see instrument.py."""
    begin: Any
    """A mark of the clock; seconds since its start once it was taken from the timeline."""
    end: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What else there is to say: ``microbatch``, ``version``, ..."""

    @property
    def seconds(self) -> float:
        """How long it took, once both ends are seconds."""
        return self.end - self.begin


class Timeline:
    """Collects the spans of a rank, in the order in which they end."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._spans: deque[Span] = deque()

    @contextmanager
    def span(self, kind: str, **facts: Any) -> Iterator[Span]:
        """Collect what happens meanwhile as one span; ``facts`` may be added to until it ends."""
        item = Span(kind, self._clock.mark(), facts=facts)
        yield item
        item.end = self._clock.mark()
        self._spans.append(item)

    def note(self, kind: str, **facts: Any) -> None:
        """Collect a moment."""
        mark = self._clock.mark()
        self._spans.append(Span(kind, mark, mark, facts))

    def take(self, *, wait: bool = False) -> list[Span]:
        """Return and forget the collected spans that are over, their ends in seconds.

        Args:
            wait: Wait for all of them.
        """
        taken = []
        while self._spans and (wait or self._clock.is_over(self._spans[0].end)):
            item = self._spans.popleft()
            item.begin = self._clock.seconds(item.begin)
            item.end = self._clock.seconds(item.end)
            taken.append(item)
        return taken
