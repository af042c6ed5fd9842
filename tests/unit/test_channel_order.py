"""The order of messages, model-checked: a send that blocks until its receive is posted is fine.

The real engine and channel run stage by stage on links that only write down what is done with them.
What a stage does depends on nothing that it receives, so these logs are its whole behaviour, and
going through all of them in step tells for any timing whether somebody waits for ever.
"""

from __future__ import annotations

from collections import deque

import pytest
import torch

from megatron_paci.channel import PipelineChannel
from megatron_paci.engine import Engine
from megatron_paci.groups import StageGroups
from megatron_paci.schedule import StageSchedule

SHAPES = [
    (n, m, a) for n in range(2, 9) for m in range(1, 10) for a in range(1, 9) if m % a == 0
]


class LoggingLink:
    """One end of a link; ``log`` is that of its stage."""

    def __init__(self, name: tuple[str, int], log: list[tuple]):
        self._name = name
        self._log = log
        self._pending = 0
        self._sent: deque[int] = deque()
        self._released = 0

    def send(self, microbatch, tensor):
        self._sent.append(microbatch)
        self._log.append(("send", self._name, "tensor"))

    def send_numbers(self, microbatch, numbers):
        self._sent.append(microbatch)
        self._log.append(("send", self._name, "numbers"))

    def send_report(self, microbatch, report):
        self._sent.append(microbatch)
        self._log.append(("send", self._name, "report"))

    def post_receive(self, shape):
        self._pending += 1
        self._log.append(("post", self._name, "tensor"))

    def post_receive_numbers(self, count):
        self._pending += 1
        self._log.append(("post", self._name, "numbers"))

    def post_receive_report(self):
        self._pending += 1
        self._log.append(("post", self._name, "report"))

    def take(self):
        self._pending -= 1
        self._log.append(("take", self._name, "tensor"))

    def take_numbers(self):
        self._pending -= 1
        self._log.append(("take", self._name, "numbers"))
        return []  # as a shape, that of the messages here

    def take_report(self):
        self._pending -= 1
        self._log.append(("take", self._name, "report"))

    @property
    def has_posted(self):
        return self._pending > 0

    def release_sent(self, arrived):
        while self._sent and self._sent[0] <= arrived:
            self._sent.popleft()
            self._released += 1
            self._log.append(("release", self._name, self._released))

    def finish(self):
        self._released += len(self._sent)
        self._sent.clear()


class Nothing:
    """Compute and window of a stage that do nothing."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: torch.zeros(()) if name == "forward" else None


def log_of_a_stage(
    stage: int, num_stages: int, accumulation: int, runs: list[int], *variant: int,
    sends_shapes: bool = False,
) -> list[tuple]:
    """Return what a stage does with its links in ``runs``; 0 stands for a drain.

    ``variant`` is how many microbatches more are in flight, and whether a step is deferred.
    """
    log: list[tuple] = []
    channel = PipelineChannel(StageGroups(alone=None), config=None, shape=tuple)
    if stage > 0:
        channel._forward_in = LoggingLink(("forward", stage), log)
        channel._backward_out = LoggingLink(("backward", stage), log)
    if stage < num_stages - 1:
        channel._forward_out = LoggingLink(("forward", stage + 1), log)
        channel._backward_in = LoggingLink(("backward", stage + 1), log)
    if sends_shapes and stage > 0:
        channel._shape_in = LoggingLink(("shape", stage), log)
    if sends_shapes and stage < num_stages - 1:
        channel._shape_out = LoggingLink(("shape", stage + 1), log)
    engine = Engine(
        StageSchedule(stage, num_stages, accumulation, *variant),
        compute=Nothing(), channel=channel, window=Nothing(),
    )
    for count in runs:
        engine.run(count) if count else engine.drain()
    return log


def walk(logs: list[list[tuple]], waiting: int = 0) -> str | None:
    """Go through the logs of all stages as far as possible.

    Args:
        waiting: Messages that a link holds before their receives are posted, without blocking.

    Returns:
        None if all are done and every message was sent, posted and taken as what it is; else what
        is wrong.
    """
    events: dict[tuple[str, str], list[str]] = {}
    position = [0] * len(logs)

    def kinds(what: str, link: str) -> list[str]:
        return events.setdefault((what, link), [])

    def blocked(what: str, link: str) -> bool:
        before, more = {"send": ("post", waiting), "take": ("send", 0)}.get(what, (None, 0))
        return before is not None and len(kinds(before, link)) + more <= len(kinds(what, link))

    moved = True
    while moved:
        moved = False
        for stage, log in enumerate(logs):
            while position[stage] < len(log) and not blocked(*log[position[stage]][:2]):
                what, link, kind = log[position[stage]]
                kinds(what, link).append(kind)
                position[stage] += 1
                moved = True
    for stage, log in enumerate(logs):
        if position[stage] < len(log):
            return f"stage {stage} waits for ever in {log[position[stage]]}"
    for link in {link for _, link in events}:
        sent, posted, taken = (kinds(what, link) for what in ("send", "post", "take"))
        if not sent == posted == taken:
            return f"messages of {link} differ: sent {sent}, posted {posted}, taken {taken}"
    return None


@pytest.mark.parametrize("sends_shapes", [False, True], ids=["fixed", "variable"])
@pytest.mark.parametrize("num_stages", range(2, 9))
def test_blocking_sends_never_deadlock(num_stages, sends_shapes):
    for n, m, a in SHAPES:
        if n == num_stages:
            runs = [m, m, m, 0, m, 0]  # three iterations, a drain, one more
            logs = [
                log_of_a_stage(stage, n, a, runs, sends_shapes=sends_shapes) for stage in range(n)
            ]
            assert walk(logs) is None, f"N={n} m={m} a={a}"


@pytest.mark.parametrize("sends_shapes", [False, True], ids=["fixed", "variable"])
@pytest.mark.parametrize("extra, deferred", [(1, False), (2, False), (0, True), (1, True)])
def test_what_waits_at_its_sender_is_bounded(extra, deferred, sends_shapes):
    """The microbatches that are in flight besides, and one message: a report may wait, too."""
    for n, m, a in SHAPES:
        if n < 6 and m < 7:
            filling = -(-2 * n * (1 + extra) // m)
            runs = [*[m] * filling, 0, m, m, 0]
            logs = [
                log_of_a_stage(stage, n, a, runs, extra, deferred, sends_shapes=sends_shapes)
                for stage in range(n)
            ]
            assert walk(logs, extra + 1) is None, f"N={n} m={m} a={a}"


def release_without_proof(logs: list[list[tuple]]) -> str | None:
    """Return a release of a message that may not have been taken yet; None if there is none.

    What has happened before a release for certain is what comes before it in its stage, and before
    the sends of what that stage has taken.
    """
    # By stage: how far the others have got for certain. By link: the same for each send and take.
    seen = [[0] * len(logs) for _ in logs]
    sends: dict[tuple, list[list[int]]] = {}
    takes: dict[tuple, list[tuple[int, int]]] = {}
    moved = True
    while moved:
        moved = False
        for stage, log in enumerate(logs):
            while seen[stage][stage] < len(log):
                what, link, number = log[seen[stage][stage]]
                taken = takes.setdefault(link, [])
                if what == "take":
                    if len(sends.get(link, [])) <= len(taken):
                        break
                    before = sends[link][len(taken)]
                    seen[stage] = [max(pair) for pair in zip(seen[stage], before)]
                    taken.append((stage, seen[stage][stage]))
                elif what == "send":
                    sends.setdefault(link, []).append(list(seen[stage]))
                elif what == "release":
                    receiver, place = taken[number - 1] if number <= len(taken) else (0, 10**9)
                    if place >= seen[stage][receiver]:
                        return f"stage {stage} releases message {number} of {link} too early"
                seen[stage][stage] += 1
                moved = True
    return None


@pytest.mark.parametrize("sends_shapes", [False, True], ids=["fixed", "variable"])
@pytest.mark.parametrize(
    "extra, deferred", [(0, False), (1, False), (2, False), (0, True), (1, True)]
)
def test_a_sent_message_is_let_go_when_its_arrival_is_certain_and_soon(
    extra, deferred, sends_shapes
):
    for n, m, a in SHAPES:
        if n < 6 and m < 7:
            filling = -(-3 * n * (1 + extra) // m)
            logs = [
                log_of_a_stage(stage, n, a, [m] * filling, extra, deferred,
                               sends_shapes=sends_shapes)
                for stage in range(n)
            ]
            assert release_without_proof(logs) is None, f"N={n} m={m} a={a}"
            for log in logs:  # no more than are in flight, and a report, wait for their proof
                for link in {link for what, link, _ in log if what == "send"}:
                    kinds = [what for what, other, _ in log if other == link]
                    depth = 2 * (1 + (n - 1) * (1 + extra)) + 2
                    assert kinds.count("send") - kinds.count("release") <= depth


def test_a_release_one_message_too_early_is_found():
    logs = [log_of_a_stage(stage, 3, 2, [2] * 8) for stage in range(3)]
    assert release_without_proof(logs) is None
    for stage, log in enumerate(logs):
        early = [
            (what, link, value + 1) if what == "release" else (what, link, value)
            for what, link, value in log
        ]
        assert "too early" in release_without_proof([*logs[:stage], early, *logs[stage + 1:]])


def test_a_receive_that_is_posted_too_late_is_found():
    """Guards the model: without receives ahead, two neighbours that both send wait for ever."""
    logs = [log_of_a_stage(stage, 2, 1, [4, 0]) for stage in range(2)]
    late = []
    for log in logs:
        posts = {link: [entry for entry in log if entry[:2] == ("post", link)]
                 for link in {entry[1] for entry in log}}
        late.append([])
        for entry in log:
            if entry[0] == "take":
                late[-1].append(posts[entry[1]].pop(0))
            if entry[0] != "post":
                late[-1].append(entry)
    assert "waits for ever" in walk(late)
    del logs[1][-1]
    assert "differ" in walk(logs) or "waits" in walk(logs)
