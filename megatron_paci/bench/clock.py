"""The logical clock of one rank: arithmetic only, exact, without torch.

Times are ``fractions.Fraction``, in whatever unit the costs of the passes are given in, so that a
result can be compared with a formula by ``==``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple


class Stamp(NamedTuple):
    """What a message or a collective carries of its sender's clock."""

    loop: Fraction
    schedule: Fraction | None
    """None if it was sent from outside of the schedule function."""

    kind: str = "other"
    """What a message holds: ``forward`` (an output), ``backward`` (a gradient), or ``other``."""

    @classmethod
    def parse(cls, text: str) -> Stamp:
        """Return the stamp that ``str`` made ``text`` of."""
        loop, schedule, kind = text.split()
        return cls(Fraction(loop), None if schedule == "-" else Fraction(schedule), kind)

    def __str__(self) -> str:
        return f"{self.loop} {'-' if self.schedule is None else self.schedule} {self.kind}"


@dataclass
class Timeline:
    """Time that only moves by computing and by waiting: ``now == compute + sum(idle)``."""

    now: Fraction = Fraction(0)
    compute: Fraction = Fraction(0)
    idle: Counter[Hashable] = field(default_factory=Counter)
    """Time spent waiting, by cause."""

    def work(self, time: Fraction) -> None:
        """Compute for ``time``."""
        self.now += time
        self.compute += time

    def wait(self, until: Fraction, cause: Hashable) -> None:
        """Be idle up to ``until``; without effect if that time has passed."""
        if until > self.now:
            self.idle[cause] += until - self.now
            self.now = until

    def copy(self) -> Timeline:
        """Return the state as it is, for ``since``."""
        return Timeline(self.now, self.compute, self.idle.copy())

    def since(self, earlier: Timeline) -> Timeline:
        """Return what was spent since ``earlier``, a copy of this timeline; ``now`` is the sum."""
        return Timeline(
            self.now - earlier.now, self.compute - earlier.compute, self.idle - earlier.idle
        )

    @property
    def utilization(self) -> Fraction:
        """Share of the time that was spent computing; 1 if no time has passed."""
        return self.compute / self.now if self.now else Fraction(1)


@dataclass
class Iteration:
    """State at the end of an iteration."""

    loop: Timeline
    schedule: Timeline
    collectives: Counter[Hashable]
    """Calls so far, by what ``VirtualClock.collective`` was given."""


class VirtualClock:
    """The clock of one rank.

    It keeps two times. ``loop`` is that of the whole training loop. ``schedule`` is the one the
    rank would have if the loop did nothing but call the schedule function again and again: only
    what is computed, received or reduced inside that function moves it. So a collective elsewhere
    in the loop does not blur what the schedule itself achieves, and a stage that leaves the
    function early is still charged for the time until it can go on in the next call.

    Attributes:
        iterations: State before the first iteration and at the end of each.
    """

    def __init__(self, *, latency: Fraction = Fraction(0)):
        """Start at time 0.

        Args:
            latency: Time that a point-to-point message travels.
        """
        self.latency = latency
        self.loop = Timeline()
        self.schedule = Timeline()
        self.collectives: Counter[Hashable] = Counter()
        self._inside = 0
        self.iterations: list[Iteration] = []
        self.end_iteration()

    @contextmanager
    def inside_schedule(self) -> Iterator[None]:
        """Context of a call of the schedule function."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def work(self, time: Fraction) -> None:
        """Compute for ``time``."""
        self.loop.work(time)
        if self._inside:
            self.schedule.work(time)

    def stamp(self, kind: str = "other") -> Stamp:
        """Return what goes with a message, or into a collective, that starts now."""
        return Stamp(self.loop.now, self.schedule.now if self._inside else None, kind)

    def receive(self, stamp: Stamp) -> None:
        """Take a message: go on when it has arrived, not before."""
        self._wait([stamp], f"{stamp.kind}_message", self.latency)

    def collective(self, stamps: list[Stamp], cause: Hashable) -> None:
        """Finish a collective: go on when its last member has entered it."""
        self._wait(stamps, cause, Fraction(0))

    def _wait(self, stamps: list[Stamp], cause: Hashable, latency: Fraction) -> None:
        self.loop.wait(max(stamp.loop for stamp in stamps) + latency, cause)
        if self._inside:
            entered = [stamp.schedule for stamp in stamps if stamp.schedule is not None]
            if entered:
                self.schedule.wait(max(entered) + latency, cause)

    def end_iteration(self) -> None:
        """Note the state at the end of an iteration."""
        self.iterations.append(
            Iteration(self.loop.copy(), self.schedule.copy(), self.collectives.copy())
        )
