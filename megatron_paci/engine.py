"""The engine: one object per pipeline stage that runs the endless PACI order across iterations.

It knows the order (schedule.py) and the bookkeeping of microbatches in flight, versions and drift;
how a pass is computed, how messages travel and how weights are updated is given to it. So the very
same code runs a stage of a distributed job, all stages of a replay in one process, and mock stages
in tests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from megatron_paci.protocols import Channel, Compute, Window
from megatron_paci.schedule import Action, Kind, StageSchedule


@dataclass(slots=True)
class InFlight:
    """A microbatch whose forward is done and whose backward is not."""

    microbatch: int
    version: int
    """The stage's version at the forward."""
    input_tensor: Any
    output_tensor: Any


class Engine:
    """One pipeline stage under PACI.

    Attributes:
        version: Optimizer steps this stage has taken since it was built.
        num_forwards: Microbatches forwarded since it was built.
        num_backwards: Likewise for backward passes; equal to ``num_forwards`` after a drain.
        num_streams: Streams that have ended, one per drain.
        drift_counts: How many microbatches had which drift (version at backward - at forward).
        in_flight_max: Most microbatches that were in flight at once.
    """

    def __init__(
        self,
        schedule: StageSchedule,
        *,
        compute: Compute,
        channel: Channel,
        window: Window,
        observer: Callable[[Engine, Action], None] | None = None,
    ):
        """Allocate the state of a stage; nothing runs and nothing is sent yet.

        Args:
            observer: Called after every action, for tests and tracing.
        """
        self.compute = compute
        self.channel = channel
        self.window = window
        self.observer = observer
        self.version = 0
        self.num_forwards = 0
        self.num_backwards = 0
        self.num_streams = 0
        self.drift_counts: Counter[int] = Counter()
        self.in_flight_max = 0
        self.in_flight: deque[InFlight] = deque()
        self._last_actions: deque[Action] = deque(maxlen=12)
        self._current: Action | None = None
        self._forward_version: int | None = None
        self._begin_stream(schedule)

    def _begin_stream(self, schedule: StageSchedule) -> None:
        self.schedule = schedule
        self._ticks = schedule.ticks()
        self._stream_forwards = 0
        self._stream_version = self.version
        self.channel.begin_stream(schedule)
        self.window.begin_stream(schedule)

    def set_accumulation(self, accumulation: int) -> None:
        """Change the window length, after a drain; without effect if it is the same."""
        old = self.schedule
        if accumulation != old.accumulation:
            self.drain()
            self._begin_stream(replace(old, accumulation=accumulation))

    def run(self, num_forwards: int) -> None:
        """Run ``num_forwards`` forwards, and the backwards and steps that fall between them.

        In a stream that has filled, these are as many backwards; they lag behind the forwards by
        ``depth - 1`` microbatches.

        Raises:
            ValueError: ``num_forwards`` is not a multiple of the window length, so a later drain
                would not fall on a window boundary.
        """
        for tick in self.ticks(num_forwards):
            for action in tick:
                self.execute(action)

    def ticks(self, num_forwards: int) -> Iterator[tuple[Action, ...]]:
        """Return what ``run`` executes; each is to be executed before the next one is asked for.

        For whoever runs several stages in turn in one process.
        """
        if num_forwards % self.schedule.accumulation:
            raise ValueError(
                f"{num_forwards} microbatches are not a multiple of the accumulation of "
                f"{self.schedule.accumulation}; choose an accumulation that divides them"
            )
        self.channel.expect_forwards(num_forwards)
        return islice(self._ticks, num_forwards)

    def drain(self) -> None:
        """Run the backwards and steps of all microbatches in flight, and begin a new stream.

        All stages have to drain after the same forwards. Without effect on a drained engine.
        """
        for action in self.drain_actions():
            self.execute(action)
        self.end_stream()

    def drain_actions(self) -> Iterator[Action]:
        """Yield what ``drain`` executes, from where the stream is when the first is asked for.

        What ``ticks`` returned is to be executed by then.
        """
        yield from self.schedule.drain(self._stream_forwards)

    def end_stream(self) -> None:
        """Begin a new stream, after ``drain_actions``."""
        assert not self.in_flight and self.num_forwards == self.num_backwards
        if self._stream_forwards:
            self.window.settle()
            self.channel.finish()
            self.num_streams += 1
            self._begin_stream(self.schedule)

    def execute(self, action: Action) -> None:
        """Run one action; the caller keeps the order of the schedule."""
        self._current = action
        kind, microbatch = action
        if kind is Kind.FORWARD:
            self._forward(microbatch)
        elif kind is Kind.BACKWARD:
            self._backward(microbatch)
        else:
            self._step()
        if self.observer is not None:
            self.observer(self, action)
        self._last_actions.append(action)
        self._current = None

    def _forward(self, microbatch: int) -> None:
        assert len(self.in_flight) < self.schedule.depth, "throttle exceeded"
        reported = self.schedule.reported_window(microbatch)
        input_tensor = self.channel.receive_forward(microbatch, reported is not None)
        if reported is not None:
            self.window.hear(self.channel.receive_downstream())
        # Cached low-precision weights are renewed by the first forward after each update.
        first_of_version = self._forward_version != self.version
        self._forward_version = self.version
        output_tensor = self.compute.forward(microbatch, input_tensor, first_of_version)
        self.channel.send_forward(microbatch, output_tensor)
        if reported is not None:
            self.channel.send_downstream(self.window.tell(self._stream_version + reported))
        self.compute.release(output_tensor)
        self.in_flight.append(InFlight(microbatch, self.version, input_tensor, output_tensor))
        if len(self.in_flight) > self.in_flight_max:
            self.in_flight_max = len(self.in_flight)
        self.num_forwards += 1
        self._stream_forwards += 1

    def _backward(self, microbatch: int) -> None:
        last = self.schedule.ends_window(microbatch)
        output_grad = self.channel.receive_backward(microbatch, last)
        oldest = self.in_flight.popleft()
        assert oldest.microbatch == microbatch, "backwards are first in, first out"
        self.window.prepare(last)
        if self._forward_version != self.version:
            self.window.gather_weights()
        input_grad = self.compute.backward(oldest.input_tensor, oldest.output_tensor, output_grad)
        self.channel.send_backward(microbatch, input_grad)
        self.drift_counts[self.version - oldest.version] += 1
        self.num_backwards += 1

    def _step(self) -> None:
        later = self.channel.receive_upstream()
        # The report leaves before the update, so that nobody upstream waits for it.
        self.channel.send_upstream(self.window.close(self.version, later))
        self.window.step()
        self.version += 1

    @property
    def streaming(self) -> bool:
        """Whether forwards have run since the last drain: the same on all stages after a run."""
        return self._stream_forwards > 0

    @property
    def interrupted(self) -> bool:
        """Whether an action was begun and did not complete: the stream cannot go on, nor drain."""
        return self._current is not None

    def describe(self) -> str:
        """Return one paragraph that says where in the schedule this stage is.

        Any thread may ask: what is in flight is copied at once.
        """
        schedule = self.schedule
        queue = " ".join(f"{each.microbatch}@v{each.version}" for each in tuple(self.in_flight))
        return (
            f"PACI stage {schedule.stage} of {schedule.num_stages}, accumulation "
            f"{schedule.accumulation}: in action {self._current or 'none'}, version "
            f"{self.version}, in flight [{queue}] of at most {schedule.depth}, last actions "
            f"{' '.join(map(str, tuple(self._last_actions))) or 'none'}"
        )

    def statistics(self) -> dict[str, Any]:
        """Return the counters as plain values, for records and reports."""
        return {
            "stage": self.schedule.stage,
            "num_stages": self.schedule.num_stages,
            "accumulation": self.schedule.accumulation,
            "extra_in_flight": self.schedule.extra_in_flight,
            "defer_step": self.schedule.defer_step,
            "updates": self.version,
            "microbatches": self.num_backwards,
            "drift_counts": {str(drift): n for drift, n in sorted(self.drift_counts.items())},
            "drift_max": max(self.drift_counts, default=0),
            "drift_bound": self.schedule.drift_bound,
            "in_flight_max": self.in_flight_max,
            "in_flight_bound": self.schedule.depth,
        }

    def close(self) -> None:
        """Release the activations of what is still in flight; the engine cannot run again."""
        self.in_flight.clear()
        self._ticks = iter(())

