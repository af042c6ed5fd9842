"""A link in one process: what it keeps, and which stream things go by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_paci.link import Link
from megatron_paci.report import Report


class Request:
    """A message that is complete when ``done`` is set."""

    done = False
    waited = False

    def is_completed(self) -> bool:
        return self.done

    def __init__(self, aside: list):
        self._aside = aside

    def wait(self) -> None:
        self.waited = True
        self.waited_aside = bool(self._aside)


@pytest.fixture
def events(monkeypatch):
    """Note what is posted and read, and whether it is by the stream aside."""
    noted: list[tuple] = []
    aside = []

    class Aside:
        """A context that can be entered again and again, as torch's."""

        def __init__(self, stream):
            pass

        def __enter__(self):
            aside.append(self)

        def __exit__(self, *exception):
            aside.pop()

    def communicate(self, *, tensor_send_next, recv_prev, tensor_shape, **others):
        kind = "send" if tensor_send_next is not None else "post"
        dtype = self.config.pipeline_dtype
        tensor = None if kind == "send" else torch.zeros(tensor_shape, dtype=dtype)
        noted.append((kind, dtype, bool(aside)))
        request = Request(aside)
        return tensor, None, {"send_next": request, "recv_prev": request}

    def init(self, pp_group, config):
        self.config = config

    tolist = torch.Tensor.tolist

    def read(tensor):
        noted.append(("read", tensor.dtype, bool(aside)))
        return tolist(tensor)

    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", Aside)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(P2PCommunicator, "__init__", init)
    monkeypatch.setattr(P2PCommunicator, "_communicate", communicate)
    monkeypatch.setattr(torch.Tensor, "tolist", read)
    return noted


def link() -> Link:
    return Link(None, SimpleNamespace(pipeline_dtype=torch.bfloat16))


def test_numbers_never_wait_for_the_compute_of_this_stage(events):
    ours = link()
    ours.send(0, torch.zeros(2))
    ours.send_report(0, Report(window=0, sum_of_squares=1.0))
    ours.send_numbers(0, torch.Size([4, 2]))
    ours.post_receive((2,))
    ours.take()
    ours.post_receive_report()
    ours.take_report()
    ours.post_receive_numbers(3)
    assert ours.take_numbers() == [0.0] * 3
    tensors, numbers = (torch.bfloat16, False), (torch.float64, True)
    assert events == [
        ("send", *tensors), ("send", *numbers), ("send", *numbers), ("post", *tensors),
        ("post", *numbers), ("read", *numbers), ("post", *numbers), ("read", *numbers),
    ]


def test_what_is_sent_is_kept_until_it_has_arrived_and_not_copied(events):
    ours = link()
    tensors = [torch.zeros(2) for _ in range(3)]
    for microbatch, tensor in enumerate(tensors):
        ours.send(microbatch, tensor)
    assert all(kept is tensor for (_, _, kept), tensor in zip(ours._sent, tensors))
    requests = [request for _, request, _ in ours._sent]
    ours.release_sent(0)
    assert [request.waited for request in requests] == [True, False, False]
    requests[1].done = True  # as NCCL can tell
    ours.release_sent(0)
    assert [request.waited for request in requests] == [True, True, False]
    ours.finish()
    assert requests[2].waited and not ours._sent


def test_a_message_is_waited_for_by_the_stream_whose_memory_it_is(events):
    ours = link()
    ours.send(0, torch.zeros(2))
    ours.send_numbers(0, [1.0])
    first, second = (request for _, request, _ in ours._sent)
    assert not second.is_completed()
    ours.release_sent(0)
    assert not first.waited_aside and second._request.waited_aside
