"""Spans of time, on a clock that the test moves."""

from __future__ import annotations

from megatron_paci.timeline import HostClock, Timeline


class LateClock:
    """A device that is behind: marks are numbers, known up to ``known``."""

    def __init__(self):
        self.now = 0
        self.known = 0

    def mark(self):
        self.now += 1
        return self.now

    def is_over(self, mark):
        return mark <= self.known

    def seconds(self, mark):
        return mark / 10


def test_spans_come_in_the_order_of_their_ends_with_their_facts():
    timeline = Timeline(HostClock(now=iter(range(50, 100)).__next__))
    with timeline.span("outer", number=1):
        with timeline.span("inner") as inner:
            inner.facts["more"] = True
        timeline.note("moment")
    inner, moment, outer = timeline.take()
    assert (inner.kind, inner.begin, inner.end, inner.facts) == ("inner", 2, 3, {"more": True})
    assert (moment.begin, moment.end) == (4, 4)
    assert (outer.begin, outer.end, outer.seconds, outer.facts) == (1, 5, 4, {"number": 1})
    assert timeline.take() == []


def test_nothing_is_waited_for_unless_it_is_asked_for():
    clock = LateClock()
    timeline = Timeline(clock)
    for _ in range(3):
        with timeline.span("F"):
            pass
    clock.known = 3  # the first span is over, the second has begun
    assert [(span.begin, span.end) for span in timeline.take()] == [(0.1, 0.2)]
    assert timeline.take() == []
    assert [(span.begin, span.end) for span in timeline.take(wait=True)] == [(0.3, 0.4), (0.5, 0.6)]


def test_what_raised_leaves_no_span():
    timeline = Timeline(HostClock())
    try:
        with timeline.span("F"):
            raise OSError
    except OSError:
        pass
    assert timeline.take() == []
