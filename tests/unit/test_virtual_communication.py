"""The clocks on ``torch.distributed``, with fake works, groups and store."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_paci.bench.clock import VirtualClock
from megatron_paci.bench.communication import Communication, _by_name
from megatron_paci.bench.exchange import Exchange
from megatron_paci.bench.work import ClockedWork
from megatron_paci.patching import PatchSet
from tests.unit.test_virtual_clock import FakeStore

GROUP = SimpleNamespace(group_name="g")
TENSOR = torch.zeros(1)


class FakeWork:
    def __init__(self, source: int = 0):
        self.waits = 0
        self.source = source

    def wait(self):
        self.waits += 1
        return "waited"

    synchronize = wait

    def is_completed(self):
        return self.waits > 0

    def _source_rank(self):
        return self.source


class Rank:
    """One of two ranks, one per stage, that share a store."""

    def __init__(self, rank: int, store: FakeStore):
        self.clock = VirtualClock()
        self.communication = Communication(
            self.clock, Exchange(store, rank=rank), stages=[0, 1]
        )

    def call(self, name: str, result, *args, **kwargs):
        """Call the wrapper of the function ``name`` around one that returns ``result``."""

        def original(*args, **kwargs):
            return result() if callable(result) else result

        original.__name__ = name
        original.__wrapped__ = getattr(c10d, name)  # for its parameters
        return self.call_original(name, original, *args, **kwargs)

    def call_original(self, name: str, original, *args, **kwargs):
        """Call the wrapper of the function ``name`` around ``original``."""
        [patch] = [p for p in self.communication.patches() if p.target.endswith(f":{name}")]
        return patch.wrapper(original, *args, **kwargs)


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(c10d, "get_global_rank", lambda group, rank: rank)
    store = FakeStore()
    yield Rank(0, store), Rank(1, store)
    assert not store


def test_a_send_costs_nothing_and_a_receive_takes_effect_at_its_wait(ranks):
    sender, receiver = ranks
    work = FakeWork()
    request = receiver.call("irecv", work, TENSOR, src=0, group=GROUP)
    sender.clock.work(Fraction(3))
    sent = FakeWork()
    sender.communication.produced([TENSOR], "forward")
    assert sender.call("isend", sent, TENSOR.detach(), 1, GROUP) is sent
    receiver.clock.work(Fraction(1))
    assert receiver.clock.loop.now == 1 and not request.is_completed()
    assert request.wait() == "waited" and request.is_completed()
    assert receiver.clock.loop.now == 3 and sender.clock.loop.now == 3
    assert receiver.clock.loop.idle == {"forward_message": 2}
    request.wait()
    assert work.waits == 2 and isinstance(request, FakeWork)


def test_a_message_is_known_by_what_was_made_last_in_its_memory(ranks):
    sender, receiver = ranks
    sender.communication.produced(TENSOR, "forward")
    sender.communication.produced([None, TENSOR], "backward")
    for _ in range(2):
        sender.clock.work(Fraction(1))
        sender.call("send", None, TENSOR, 1, GROUP)
        receiver.call("recv", 0, TENSOR, 0, GROUP)
    # Sent once; by then the memory may hold something else.
    assert receiver.clock.loop.idle == {"backward_message": 1, "other_message": 1}
    sender.communication.produced(TENSOR, "forward")
    sender.communication.end_iteration()
    sender.clock.work(Fraction(1))
    sender.call("send", None, TENSOR, 1, GROUP)
    receiver.call("recv", 0, TENSOR, 0, GROUP)
    assert receiver.clock.loop.idle["other_message"] == 2


def test_blocking_calls_and_group_ranks(ranks):
    sender, receiver = ranks
    sender.clock.work(Fraction(3))
    sender.call("send", None, TENSOR, group=GROUP, group_dst=1)
    assert receiver.call("recv", 0, TENSOR, group=GROUP, group_src=0) == 0
    assert receiver.clock.loop.idle == {"other_message": 3}


def test_a_receive_from_anybody_learns_its_sender_late(ranks):
    sender, receiver = ranks
    sender.clock.work(Fraction(3))
    sender.call("isend", FakeWork(), TENSOR, 1, GROUP)
    receiver.call("irecv", FakeWork(source=0), TENSOR, group=GROUP).wait()
    assert receiver.clock.loop.now == 3
    sender.clock.work(Fraction(1))
    sender.call("send", None, TENSOR, 1, GROUP)
    receiver.call("recv", 0, TENSOR, group=GROUP)
    assert receiver.clock.loop.now == 4


@pytest.mark.parametrize("num_works", [2, 1])  # one each (gloo), or one for the batch (NCCL)
def test_batches(ranks, num_works):
    def ops(peer):
        common = {"tensor": TENSOR, "group": GROUP, "tag": 0, "peer": peer}
        return [SimpleNamespace(op=dist.irecv, **common), SimpleNamespace(op=dist.isend, **common)]

    works = [[FakeWork() for _ in range(num_works)] for _ in ranks]
    ranks[0].clock.work(Fraction(2))
    ranks[1].clock.work(Fraction(5))
    requests = [
        rank.call("batch_isend_irecv", some, ops(1 - number))
        for number, (rank, some) in enumerate(zip(ranks, works))
    ]
    assert [len(some) for some in requests] == [num_works] * 2
    for some in requests:
        for request in some:
            request.wait()
    assert [rank.clock.loop.now for rank in ranks] == [5, 5]
    assert all(work.waits == 1 for some in works for work in some)


def enter_both(ranks, name, *args, **kwargs):
    """Let both ranks make the same asynchronous call; return their works."""
    return [rank.call(name, FakeWork(), *args, async_op=True, **kwargs) for rank in ranks]


def test_an_asynchronous_collective_takes_effect_at_its_wait(ranks):
    ranks[0].clock.work(Fraction(4))
    works = enter_both(ranks, "all_reduce", TENSOR, group=GROUP)
    ranks[0].clock.work(Fraction(1))
    assert ranks[1].clock.loop.now == 0
    for work in works:
        work.wait()
    assert [rank.clock.loop.now for rank in ranks] == [5, 4]
    [(cause, count)] = ranks[1].clock.collectives.items()
    assert count == 1 and cause.call == "all_reduce" and cause.crosses
    # This file's frames stand where Megatron's would.
    assert "test_virtual_communication.py:call_original:" in cause.site
    assert ranks[1].clock.loop.idle == {cause: 4}


def test_what_a_collective_is_built_on_is_not_counted(ranks):
    first, second = ranks

    def inner():
        first.call("all_gather", None, [TENSOR], TENSOR, group=GROUP)
        first.call("batch_isend_irecv", [], [])
        return FakeWork()

    works = [
        first.call("broadcast", inner, TENSOR, 0, GROUP, async_op=True),
        second.call("broadcast", FakeWork(), TENSOR, 0, GROUP, async_op=True),
    ]
    for work in works:
        work.wait()
    assert sum(first.clock.collectives.values()) == 1


def test_a_failed_call_is_over(ranks):
    def fail():
        raise ValueError

    with pytest.raises(ValueError):
        ranks[0].call("all_reduce", fail, TENSOR, group=GROUP)
    ranks[1].call("all_reduce", FakeWork(), TENSOR, group=GROUP, async_op=True).wait()
    ranks[0].call("send", None, TENSOR, 1, GROUP)
    ranks[1].call("recv", 0, TENSOR, 0, GROUP)
    assert not ranks[0].communication._state.nested
    # The one that failed has not read the others' times.
    for key in [key for key in ranks[0].communication._exchange._store if "collective" in key]:
        ranks[0].communication._exchange._store.delete_key(key)


def test_groups_of_one_rank_and_foreign_groups_are_left_alone(ranks, monkeypatch):
    outside = dist.GroupMember.NON_GROUP_MEMBER
    assert ranks[0].call("all_reduce", None, TENSOR, group=outside) is None
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    assert ranks[0].call("barrier", None, group=GROUP) is None
    assert not ranks[0].clock.collectives


@pytest.mark.parametrize("asynchronous", [False, True])
def test_coalesced_collectives_take_effect_together(ranks, asynchronous):
    @contextmanager
    def original(group=None, device=None, async_ops=False):
        yield manager

    manager = c10d._CoalescingManager()
    first, second = ranks
    first.clock.work(Fraction(6))
    others = []
    with second.call_original("_coalescing_manager", original, GROUP, async_ops=asynchronous):
        for _ in range(2):
            others += [first.call("all_reduce", FakeWork(), TENSOR, group=GROUP, async_op=True)]
            assert second.call("all_reduce", None, TENSOR, group=GROUP) is None
        assert second.clock.loop.now == 0
    assert second.clock.loop.now == (0 if asynchronous else 6)
    for work in [manager, *others]:
        work.wait()
    assert [rank.clock.loop.now for rank in ranks] == [6, 6]


def test_after_closing_nothing_is_waited_for(ranks):
    request = ranks[1].call("irecv", FakeWork(), TENSOR, src=0, group=GROUP)
    ranks[1].communication.close()
    assert request.wait() == "waited"


def test_arguments_are_known_by_name():
    wrapped = _by_name(lambda original, call, *args, **kwargs: call)
    assert wrapped(dist.isend, TENSOR, 3) == {"tensor": TENSOR, "dst": 3}


def test_a_work_that_only_moves_the_clock():
    moved = []
    work = ClockedWork(None, [lambda: moved.append(1)])
    assert work.wait() is True and moved == [1]
    work.synchronize()
    assert moved == [1]


def test_uninstall_gives_every_function_back_by_identity():
    def functions():
        return {
            (module.__name__, name): value
            for module in (dist, c10d, *[m for n, m in sys.modules.items() if "megatron.core" in n])
            for name, value in list(vars(module).items())
            if callable(value)
        }

    before = functions()
    rank = Rank(0, FakeStore())
    patches = PatchSet(rank.communication.patches())
    patches.install()
    changed = {name for key, name in before if functions()[key, name] is not before[key, name]}
    assert {"all_reduce", "isend", "barrier", "_coalescing_manager"} <= changed
    c10d._check_op(dist.isend)  # torch's own check of P2POp knows the wrappers
    patches.uninstall()
    after = functions()
    assert before.keys() == after.keys()
    assert all(after[key] is before[key] for key in before)
