"""What timers of Megatron's loop wait for while the stream runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.timers import Timer

from megatron_paci import loop, train_step
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


def test_memory_is_freed_only_when_the_stream_is_drained(monkeypatch):
    """Freeing waits for the whole device, so for messages that other stages send later."""
    freed = []
    engine = SimpleNamespace(streaming=True)
    stage = SimpleNamespace(
        engine=engine, is_last_stage=False, set_accumulation=lambda accumulation: None,
        window=SimpleNamespace(ledger=SimpleNamespace(newest=None)),
        has_skipped=lambda: False,
    )
    arguments = SimpleNamespace(
        paci_accum=1, paci_accum_schedule=None, consumed_train_samples=0, seq_length=1,
        micro_batch_size=1, decoder_seq_length=None, empty_unused_memory_level=1,
        log_num_zeros_in_grad=False,
    )
    monkeypatch.setattr(train_step, "get_args", lambda: arguments)
    monkeypatch.setattr(train_step, "installed_stage", lambda: stage)
    monkeypatch.setattr(train_step, "get_num_microbatches", lambda: 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(engine.streaming))
    for streaming in (True, False):
        engine.streaming = streaming
        train_step.paci_train_step(None, None, None, None, None, None, lambda **_: [])
    assert freed == [False]
