"""What timers of Megatron's loop wait for while the stream runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.timers import Timer

from megatron_paci import loop
from megatron_paci.cpu import CpuDevice


@pytest.fixture
def synchronized(monkeypatch):
    """Yield the list of what was waited for."""
    waited = []
    device = CpuDevice()
    device.install()
    whole = torch.cuda.synchronize
    torch.cuda.synchronize = lambda: waited.append("device")
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(
            synchronize=lambda: waited.append("stream")
        )
    )
    yield waited
    torch.cuda.synchronize = whole
    monkeypatch.undo()
    device.uninstall()


def test_timers_wait_for_the_stream_alone_while_microbatches_are_in_flight(
    synchronized, monkeypatch
):
    """A wait for the device would be one for messages that are posted ahead as well."""
    monkeypatch.setattr(torch.distributed, "barrier", lambda **_: synchronized.append("barrier"))
    for streaming, waits in ((True, ["stream", "stream"]),
                             (False, ["barrier", "device", "barrier", "device"])):
        monkeypatch.setattr(loop, "streaming", lambda streaming=streaming: streaming)
        timer = Timer("test")
        loop._start_or_stop_alone(Timer.start, timer, barrier=True)
        loop._start_or_stop_alone(Timer.stop, timer, barrier=True)
        assert synchronized == waits
        synchronized.clear()
