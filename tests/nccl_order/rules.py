"""NCCL's order rules, simulated: does a job of many ranks get to its end, for any timing?

Pure: knows neither torch nor the plugin. The input is one log per rank: what its host does, in its
order (the events below). What a rank does must not depend on what it receives or when, so a log is
its whole behaviour. Whatever may begin then begins sooner or later; the order in which this program
lets things begin makes no difference to how far the job gets, so one walk stands for all timings.

The rules, each the strictest of what the public documentation of NCCL, PyTorch and CUDA allows:

1. All operations of one process group on one rank run in the order posted, on a stream of their
   own: messages of both directions with all peers, batches and collectives. (PyTorch: so with
   eager initialization, when ``init_process_group`` is given a ``device_id``. With lazy
   initialization a pair of ranks has a communicator and a stream of its own for unbatched
   messages, for both directions; that is less strict.)
2. An operation begins only when what was on the rank's current stream when it was posted is done.
3. A send completes only together with its receive, once both have begun: nothing is buffered.
   (NCCL: both are blocking for the GPU.)
4. The messages from one rank to another in one group match in the order posted. Their bytes must be
   equal, and one side must not be in a batch if the other is not (with lazy initialization they
   would be on two communicators). Either is an error of its own.
5. The parts of a batch (``batch_isend_irecv``, ncclGroupStart and -End) progress together, so they
   do not block each other; the batch is one operation of its stream.
6. A collective completes when all members of its group have begun theirs. They must agree in name
   and bytes, in the order posted.
7. ``request.wait()`` lets the current stream wait, not the host.
8. A host that waits for its current stream (``.item()``, ``.tolist()``, a copy to the host) or for
   the whole device (``torch.cuda.synchronize``, freeing memory) posts nothing meanwhile.
9. The first message from one rank to another in a group makes the host wait until the other one's
   host has come to it, the first collective until those of all members have: connections are made
   then.
10. Groups are independent of each other.

(Rule 7 the other way, ``TORCH_NCCL_BLOCKING_WAIT=1``, forbids no more once connections stand: what
the host would have posted meanwhile could not have begun, by rule 2.)

Two more may be added, since the environment can make them true. They only forbid more:

- ``one_queue``: nothing begins on a device before all that its host has issued earlier has begun,
  on whatever stream (``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron asks for).
- ``device_waits``: after everything that it issues the host waits for the whole device. (NCCL's
  guide: with several communicators any CUDA operation can cause a device synchronization.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """A send or a receive."""

    sends: bool
    peer: int
    """Rank of the other side."""
    num_bytes: int


class Messages(NamedTuple):
    """The host posts a send or a receive, or several that progress together."""

    group: str
    parts: tuple[Part, ...]
    batched: bool = False


class Collective(NamedTuple):
    """The host posts its part of a collective."""

    group: str
    name: str
    members: tuple[int, ...]
    num_bytes: int = 0


class Wait(NamedTuple):
    """The host lets its current stream wait for an operation."""

    operation: int
    """Number of the ``Messages`` or ``Collective`` in this log, counting from 0."""


class HostWait(NamedTuple):
    """The host waits."""

    whole_device: bool = False
    """Else for the current stream."""


class Mark(NamedTuple):
    """Compute of a name; says in a message where a rank is."""

    text: str


Event = Messages | Collective | Wait | HostWait | Mark


def plain(log: Iterable[Event]) -> list[list]:
    """Return a log as plain values, for JSON."""
    return [[type(event).__name__, *event] for event in log]


def from_plain(entries: Iterable[list]) -> list[Event]:
    """Inverse of ``plain``."""
    kinds = {kind.__name__: kind for kind in (Messages, Collective, Wait, HostWait, Mark)}
    log = []
    for name, *fields in entries:
        if name == "Messages":
            fields[1] = tuple(Part(*part) for part in fields[1])
        elif name == "Collective":
            fields[2] = tuple(fields[2])
        log.append(kinds[name](*fields))
    return log


class OrderError(AssertionError):
    """The logs break a rule, or somebody waits for ever; the message says who and why."""


def check(
    logs: Sequence[Iterable[Event]],
    *,
    connected: bool = False,
    one_queue: bool = False,
    device_waits: bool = False,
) -> None:
    """Go through the logs of all ranks to their ends.

    Args:
        connected: Whether all connections of rule 9 stand already.

    Raises:
        OrderError: Somebody waits for ever, or messages or collectives do not match.
    """
    job = _Job(len(logs))
    ranks = [
        _Rank(job, rank, list(log), connected, one_queue, device_waits)
        for rank, log in enumerate(logs)
    ]
    while job.changed:
        ranks[job.changed.pop()].advance()
    if any(not rank.finished for rank in ranks):
        raise OrderError("\n".join(rank.describe() for rank in ranks))


class _Operation:
    """What is on a device: the parts of a batch, a collective, or a wait of the current stream."""

    __slots__ = ("rank", "event", "keys", "behind", "stream_before", "begun", "missing")

    def __init__(self, rank, event, keys, behind, stream_before):
        self.rank = rank
        self.event = event
        self.keys = keys
        """One per part, equal on both sides; that of a collective; none for a wait."""
        self.behind = behind
        """What its own stream has before it, None at the start."""
        self.stream_before = stream_before
        """What the current stream had last when it was posted."""
        self.begun = False
        self.missing = len(keys)
        """Keys that others have not begun yet."""

    @property
    def done(self) -> bool:
        return self.begun and not self.missing


class _Job:
    """What the ranks have in common."""

    def __init__(self, size: int):
        self.changed = set(range(size))
        """Ranks that may be able to go on."""
        self.posted: dict[tuple, dict[int, tuple]] = {}
        """What the first side to post has said of each key."""
        self.begun: dict[tuple, list[_Operation]] = {}
        self.arrived: dict[tuple, set[int]] = {}

    def agree(self, key: tuple, said: tuple, rank: int, what: str) -> None:
        """Check what a rank says of a message or collective against who has said so before."""
        other, before = self.posted.setdefault(key, (rank, said))
        if before != said:
            raise OrderError(
                f"{what}: rank {other} has posted {before}, rank {rank} {said}"
            )

    def begin(self, key: tuple, operation: _Operation, members: int) -> None:
        """Note that one side has begun; the last one completes the key for all."""
        sides = self.begun.setdefault(key, [])
        sides.append(operation)
        if len(sides) == members:
            del self.begun[key]
            for side in sides:
                side.missing -= 1
                self.changed.add(side.rank)

    def meet(self, key: tuple, rank: int, members: tuple[int, ...]) -> bool:
        """Whether the hosts of all members have come to the first use of a connection."""
        there = self.arrived.setdefault(key, set())
        if rank not in there:
            there.add(rank)
            self.changed.update(members)
        return len(there) == len(members)


class _Rank:
    """One rank: its host, its streams and what is on them."""

    def __init__(self, job, rank, log, connected, one_queue, device_waits):
        self._job = job
        self._rank = rank
        self._log = log
        self._all_connected = connected
        self._one_queue = one_queue
        self._device_waits = device_waits
        self._position = 0
        self._operations: list[_Operation] = []
        self._last: dict[str, _Operation] = {}
        """Newest operation of every stream; that of the current stream has the name ""."""
        self._waiting: dict[str, deque[_Operation]] = {}
        """Those that have not begun, by queue: one per stream, or one for all."""
        self._pending: list[_Operation] = []
        """Those that are not done, as far as looked at, in the order issued."""
        self._numbers: dict[tuple, int] = {}
        self._connected: set[tuple] = set()

    @property
    def finished(self) -> bool:
        """Whether the host is at its end and everything on the device is done."""
        return self._position == len(self._log) and self._device_is_done()

    def advance(self) -> None:
        """Go as far as possible."""
        while self._advance_device() | self._advance_host():
            pass

    def _advance_device(self) -> bool:
        moved = False
        for queue in self._waiting.values():
            while queue and self._may_begin(queue[0]):
                operation = queue.popleft()
                operation.begun = moved = True
                for key in operation.keys:
                    members = 2 if isinstance(operation.event, Messages) else len(
                        operation.event.members)
                    self._job.begin(key, operation, members)
        return moved

    def _may_begin(self, operation: _Operation) -> bool:
        if isinstance(operation.event, Wait):
            if not self._operations[operation.event.operation].done:
                return False
        behind, before = operation.behind, operation.stream_before
        return (behind is None or behind.done) and (before is None or before.done)

    def _advance_host(self) -> bool:
        start = self._position
        while self._position < len(self._log):
            if self._device_waits and not self._device_is_done():
                break
            if not self._host_does(self._log[self._position]):
                break
            self._position += 1
            if self._device_waits:
                break
        return self._position > start

    def _host_does(self, event: Event) -> bool:
        """Do one event of the log; False if the host has to wait at it."""
        if isinstance(event, Messages):
            return self._connect(event) and self._post_messages(event)
        if isinstance(event, Collective):
            return self._connect(event) and self._post_collective(event)
        if isinstance(event, Wait):
            self._issue(event, "", ())
            return True
        if isinstance(event, HostWait):
            if event.whole_device:
                return self._device_is_done()
            last = self._last.get("")
            return last is None or last.done
        return True

    def _device_is_done(self) -> bool:
        self._pending = [each for each in self._pending if not each.done]
        return not self._pending

    def _connect(self, event: Messages | Collective) -> bool:
        if self._all_connected:
            return True
        if isinstance(event, Collective):
            pairs = [((event.group,), event.members)]
        else:
            pairs = [
                ((event.group, *self._direction(part)), (self._rank, part.peer))
                for part in event.parts
            ]
        missing = [pair for pair in pairs if pair[0] not in self._connected]
        # All of them are announced before the first is waited for: a batch connects as one.
        if not all([self._job.meet(key, self._rank, members) for key, members in missing]):
            return False
        self._connected.update(key for key, _ in missing)
        return True

    def _direction(self, part: Part) -> tuple[int, int]:
        return (self._rank, part.peer) if part.sends else (part.peer, self._rank)

    def _post_messages(self, event: Messages) -> bool:
        keys = []
        for part in event.parts:
            link = (event.group, *self._direction(part))
            number = self._count((*link, part.sends))
            keys.append((*link, number))
            said = f"{part.num_bytes} bytes" + (" in a batch" if event.batched else "")
            self._job.agree(
                keys[-1], said, self._rank,
                f"message {number} from rank {link[1]} to {link[2]} of {event.group}",
            )
        self._operations.append(self._issue(event, event.group, tuple(keys)))
        return True

    def _post_collective(self, event: Collective) -> bool:
        number = self._count((event.group,))
        key = (event.group, number)
        said = f"{event.name} of {event.num_bytes} bytes"
        self._job.agree(key, said, self._rank, f"collective {number} of {event.group}")
        self._operations.append(self._issue(event, event.group, (key,)))
        return True

    def _count(self, key: tuple) -> int:
        number = self._numbers.get(key, 0)
        self._numbers[key] = number + 1
        return number

    def _issue(self, event: Event, stream: str, keys: tuple) -> _Operation:
        operation = _Operation(
            self._rank, event, keys, self._last.get(stream), self._last.get("")
        )
        self._last[stream] = operation
        self._pending.append(operation)
        self._waiting.setdefault("" if self._one_queue else stream, deque()).append(operation)
        return operation

    def describe(self) -> str:
        """Say where this rank is and what it waits for."""
        if self.finished:
            return f"rank {self._rank}: done"
        marks = [event.text for event in self._log[: self._position] if isinstance(event, Mark)]
        at = self._log[self._position] if self._position < len(self._log) else "its end"
        lines = [
            f"rank {self._rank}: the host is at event {self._position} of {len(self._log)}, {at}, "
            f"after {' '.join(marks[-6:]) or 'no compute'}; on the device are"
        ]
        for operation in [each for each in self._pending if not each.done][:12]:
            event = operation.event
            if isinstance(event, Wait):
                event = f"a wait for {self._operations[event.operation].event}"
            lines.append(f"    {'begun' if operation.begun else 'not begun'}: {event}")
        return "\n".join(lines)


def without(log: Iterable[Event], group: str) -> list[Event]:
    """Return a log without the operations of the groups whose names begin with ``group``."""
    kept: list[Event] = []
    numbers: list[int | None] = []
    count = 0
    for event in log:
        if isinstance(event, Messages | Collective):
            stays = not event.group.startswith(group)
            numbers.append(count if stays else None)
            count += stays
            if not stays:
                continue
        elif isinstance(event, Wait):
            if numbers[event.operation] is None:
                continue
            event = Wait(numbers[event.operation])
        kept.append(event)
    return kept
