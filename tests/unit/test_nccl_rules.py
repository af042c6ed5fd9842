"""The checker of NCCL's order rules finds what is wrong, and lets pass what is right."""

from __future__ import annotations

import pytest

from tests.nccl_order.rules import (
    Collective,
    HostWait,
    Mark,
    Messages,
    OrderError,
    Part,
    Wait,
    check,
    without,
)


def send(peer, group="down", num_bytes=8):
    return Messages(group, (Part(True, peer, num_bytes),))


def receive(peer, group="down", num_bytes=8):
    return Messages(group, (Part(False, peer, num_bytes),))


def gather(*members, name="all_gather"):
    return Collective("all", name, members)


DEADLOCKS = {
    "one communicator for both directions": [
        [receive(1), send(1), Wait(0), Wait(1)], [receive(0), send(0), Wait(0), Wait(1)]
    ],
    "a receive ahead on the communicator of a later send": [
        # Rank 1 answers the message that it has, but waits for the next one in between.
        [send(1), receive(1), Wait(1), send(1)],
        [receive(0), Wait(0), receive(0), send(0)],
    ],
    "a missing receive": [[send(1)], []],
    "a missing send": [[], [receive(0), Wait(0)]],
    "a send that is waited for before the receive of the other's": [
        [send(1, "down"), Wait(0), receive(1, "up")], [send(0, "up"), Wait(0), receive(0, "down")]
    ],
    "a host that waits for its device while a receive is posted ahead": [
        [receive(1, "up"), HostWait(whole_device=True), send(1)],
        [receive(0), Wait(0), send(0, "up")],
    ],
    "a host that waits for its stream while this waits for an answer": [
        [receive(1, "up"), Wait(0), HostWait(), send(1)], [receive(0), Wait(0), send(0, "up")]
    ],
    "work on the stream before a send that waits for its answer": [
        [receive(1, "up"), Wait(0), send(1)], [receive(0), Wait(0), send(0, "up")]
    ],
    "a collective that one rank reaches after a message of another that has entered it": [
        [gather(0, 1), Wait(0), HostWait(), send(1)], [receive(0), Wait(0), gather(0, 1)]
    ],
    "a collective between messages of its communicator": [
        [Collective("down", "barrier", (0, 1)), send(1)],
        [receive(0), Collective("down", "barrier", (0, 1))],
    ],
    "a collective without a member": [[gather(0, 1)], []],
}

MISMATCHES = {
    "8 bytes": [[send(1)], [receive(0, num_bytes=4)]],
    "56 bytes": [  # a report and a tensor, the other way round
        [send(1, num_bytes=56), send(1)], [receive(0), receive(0, num_bytes=56)]
    ],
    "in a batch": [[Messages("down", (Part(True, 1, 8),), batched=True)], [receive(0)]],
    "all_reduce": [[gather(0, 1)], [gather(0, 1, name="all_reduce")]],
}

ONLY_UNDER = {
    # The device of rank 0 has its send behind a receive that waits for another one.
    "one_queue": [
        [receive(1, "up"), receive(1, "up"), send(1)],
        [receive(0), Wait(0), send(0, "up"), send(0, "up")],
    ],
    "device_waits": [[receive(1, "up"), send(1)], [receive(0), Wait(0), send(0, "up")]],
}


@pytest.mark.parametrize("logs", DEADLOCKS.values(), ids=DEADLOCKS)
def test_a_deadlock_is_found(logs):
    with pytest.raises(OrderError, match="the host is at event"):
        check(logs, connected=True)


@pytest.mark.parametrize(("rule", "logs"), ONLY_UNDER.items(), ids=ONLY_UNDER)
def test_an_added_rule_finds_what_others_let_pass(rule, logs):
    check(logs, connected=True)
    with pytest.raises(OrderError, match="the host is at event"):
        check(logs, connected=True, **{rule: True})


def test_a_first_message_makes_the_host_wait_for_the_other_one():
    logs = [[send(1, "a"), send(1, "b")], [receive(0, "b"), receive(0, "a")]]
    check(logs, connected=True)
    with pytest.raises(OrderError, match="the host is at event 0 of 2"):
        check(logs)


@pytest.mark.parametrize(("found", "logs"), MISMATCHES.items(), ids=MISMATCHES)
def test_a_mismatch_is_found(found, logs):
    with pytest.raises(OrderError, match=f"has posted.*{found}"):
        check(logs, connected=True)


def test_the_same_messages_on_communicators_of_their_own_are_fine():
    check([
        [receive(1, "up"), send(1), Wait(0), Wait(1)],
        [receive(0), send(0, "up"), Wait(0), Wait(1)],
    ], connected=True)


def test_parts_of_a_batch_progress_together():
    def batch(peer):
        return Messages("both", (Part(False, peer, 8), Part(True, peer, 8)), batched=True)

    check([[batch(1), Wait(0)], [batch(0), Wait(0)]])
    check([[batch(1), Wait(0)], [batch(0), Wait(0)]], one_queue=True, device_waits=True)


def test_a_collective_waits_for_its_last_member():
    check([[gather(0, 1, 2), Wait(0), HostWait(), send(1)],
           [gather(0, 1, 2), receive(0), Wait(1)],
           [Mark("F0"), gather(0, 1, 2)]], connected=True)


def test_without_a_group():
    log = [send(1, "a"), send(1, "b"), Wait(0), Mark("F0"), Wait(1)]
    assert without(log, "a") == [send(1, "b"), Mark("F0"), Wait(0)]
