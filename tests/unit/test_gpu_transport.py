"""What the GPU check puts under Megatron: messages through the host, groups that keep their order.

Without a GPU and without processes: the methods below are stand-ins that note what they are given.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ProcessGroup, ReduceOp
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.gpu.host_transport import host_transport
from tests.gpu.older_torch import keep_order_of_ranks, keeps_order


class Request:
    """A request of a stand-in group: it has a message for ``place`` once it is waited for."""

    def __init__(self, place=None, message=0.0):
        self.place, self.message, self.waited = place, message, False

    def wait(self):
        self.waited = True
        if self.place is not None:
            self.place.fill_(self.message)

    def is_completed(self):
        return self.waited


class Group:
    """Notes what is sent and reduced."""

    def __init__(self):
        self.sent, self.received, self.reduced, self.coalesced = [], [], [], []

    def allreduce(self, tensors, options):
        self.reduced.append((tensors, options.reduceOp))
        return Request()


@pytest.fixture
def group(monkeypatch):
    def send(group, tensors, *args):
        group.sent.append((*tensors, *args))
        return Request()

    def receive(group, tensors, *args):
        group.received.append((*tensors, *args))
        return Request(tensors[0], 3.0)

    def reduce(group, tensors, options):
        group.coalesced.append(tensors)
        return Request()

    monkeypatch.setattr(ProcessGroup, "send", send)
    monkeypatch.setattr(ProcessGroup, "recv", receive)
    monkeypatch.setattr(ProcessGroup, "allreduce_coalesced", reduce)
    return Group()


def in_double(tensor):
    """Stands for being on a GPU."""
    return tensor.dtype == torch.float64


def test_a_message_is_copied_before_it_is_sent(group):
    tensor = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    with host_transport(in_double):
        ProcessGroup.send(group, [tensor], 1, 0)
    [(sent, peer, tag)] = group.sent
    assert sent.data_ptr() != tensor.data_ptr() and torch.equal(sent, tensor.detach())
    assert not sent.requires_grad and (peer, tag) == (1, 0)


def test_a_message_is_put_in_place_when_it_is_waited_for(group):
    place = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    with host_transport(in_double):
        request = ProcessGroup.recv(group, [place], 1, 0)
    assert group.received[0][0].data_ptr() != place.data_ptr()
    assert not request.is_completed() and place.sum() == 0
    request.wait()
    assert request.is_completed() and torch.equal(place, torch.full_like(place, 3.0))
    assert place.requires_grad and place.is_leaf


def test_a_coalesced_reduction_is_done_one_by_one(group):
    tensors = [torch.ones(2, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    options = torch.distributed.AllreduceCoalescedOptions()
    options.reduceOp = ReduceOp.MAX
    with host_transport(in_double):
        request = ProcessGroup.allreduce_coalesced(group, tensors, options)
    assert [each for each, _ in group.reduced] == [[tensor] for tensor in tensors]
    assert all(operation == ReduceOp.MAX for _, operation in group.reduced)
    assert group.coalesced == [] and not request.is_completed()
    request.wait()
    assert request.is_completed()


def test_other_tensors_go_as_they_are(group):
    tensor = torch.ones(2)
    with host_transport(in_double):
        ProcessGroup.send(group, [tensor], 1, 0)
        ProcessGroup.recv(group, [tensor], 1, 0)
        ProcessGroup.allreduce_coalesced(
            group, [tensor], torch.distributed.AllreduceCoalescedOptions()
        )
    assert group.sent[0][0] is group.received[0][0] is group.coalesced[0][0] is tensor


def test_the_methods_are_given_back(group):
    names = ("send", "recv", "allreduce_coalesced")
    before = [getattr(ProcessGroup, name) for name in names]
    with pytest.raises(KeyError), host_transport(in_double):
        assert all(getattr(ProcessGroup, name) is not old for name, old in zip(names, before))
        raise KeyError
    assert [getattr(ProcessGroup, name) for name in names] == before


def test_an_older_torch_keeps_the_order_where_it_is_asked_to(monkeypatch):
    module = torch.distributed.distributed_c10d

    def new_group(ranks):  # finds "sorted" as the functions of the module do
        return vars(module).get("sorted", sorted)(ranks)

    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    assert not keeps_order()
    keep_order_of_ranks()
    assert torch.distributed.new_group([3, 1], sort_ranks=False) == [3, 1]
    assert torch.distributed.new_group([3, 1]) == [1, 3]
    assert "sorted" not in vars(module)


def test_real_groups_keep_their_order(monkeypatch):
    """This PyTorch would do so by itself; here it is not told to."""
    assert keeps_order()
    monkeypatch.setattr(torch.distributed, "new_group", torch.distributed.new_group)
    keep_order_of_ranks()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for sort_ranks, expected in ((False, [1, 0]), (True, [0, 1])):
            group = torch.distributed.new_group([1, 0], sort_ranks=sort_ranks)
            assert torch.distributed.get_process_group_ranks(group) == expected
            assert group.rank() == expected.index(0)
    finally:
        torch.distributed.destroy_process_group()
