"""The hot path: what it costs the host is measured fairly, and it never waits for the device."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import chain, islice

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_paci.bench import host, host_command, host_rig
from megatron_paci.bench.host_rig import HostRig
from megatron_paci.build import installed_stage
from megatron_paci.schedule import STEP, Kind

WAITS = (
    "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__iter__"
)


@pytest.fixture
def rig():
    """Return a function that builds a rig, which is closed after the test."""
    rigs = []

    def build(*args, **kwargs):
        rigs.append(HostRig(*args, **kwargs))
        return rigs[-1]

    yield build
    for each in rigs:
        each.close()


@pytest.mark.parametrize("stage", range(4))
def test_nothing_waits_for_the_device_but_the_reports_of_windows(stage, rig, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    built = rig(stage, 4, 8, 4, posting=True)
    engine = installed_stage().engine
    seen = []

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            seen.append((name, str(engine._current)))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for name in WAITS:
        watch(torch.Tensor, name)
    watch(torch.cuda, "synchronize")
    for _ in range(4):
        built.paci()
    schedule = engine.schedule
    reported = [
        ("tolist", str(action))
        for action in chain.from_iterable(islice(schedule.ticks(), 4 * 8))
        if (action is STEP and stage < 3)
        or (action.kind is Kind.FORWARD and stage > 0
            and schedule.reported_window(action.microbatch) is not None)
    ]
    assert seen == reported and len(reported) > 4
    assert not caplog.records
    torch.zeros(1).item()
    assert seen[-1] == ("item", "None")  # guards the test: it would have been seen


def test_both_schedules_call_and_send_the_same(rig, monkeypatch):
    """Guards the measurement: neither does less, reports apart, which PACI sends besides."""
    calls = []

    def counted(name):
        original = getattr(host_rig, name)

        def counting(*args, **kwargs):
            calls.append(name)
            if name == "communicate":
                calls.extend(key for key in ("tensor_send_next", "tensor_send_prev")
                             if kwargs[key] is not None)
                calls.extend(key for key in ("recv_prev", "recv_next") if kwargs[key])
            return original(*args, **kwargs)

        monkeypatch.setattr(host_rig, name, counting)

    for name in ("forward_step", "backward_step", "communicate"):
        counted(name)
    built = rig(1, 3, 4, 4)
    built.megatron()
    theirs = {name: calls.count(name) for name in set(calls)}
    calls.clear()
    built.paci()
    installed_stage().drain()
    assert theirs["forward_step"] == theirs["backward_step"] == 4
    for name in ("forward_step", "backward_step"):
        assert calls.count(name) == 4
    # PACI's links know one direction: what is sent is "next", what is received is from "prev".
    sends = theirs["tensor_send_next"] + theirs["tensor_send_prev"]
    receives = theirs["recv_prev"] + theirs["recv_next"]
    assert sends == receives == 8
    assert calls.count("tensor_send_next") == 8 + 1  # and the report upstream
    assert calls.count("recv_prev") == 8 + 1


def test_a_rig_puts_everything_back(rig):
    names = [
        (schedules, "forward_step"), (schedules, "backward_step"), (torch, "zeros"),
        (P2PCommunicator, "_communicate"), (torch.cuda, "current_device"),
    ]
    before = [getattr(owner, name) for owner, name in names]
    built = HostRig(0, 2, 2, 2)
    assert schedules.forward_step is host_rig.forward_step
    built.paci()
    built.close()
    assert [getattr(owner, name) for owner, name in names] == before
    assert installed_stage() is None and not torch.distributed.is_initialized()


def test_an_observed_stage_has_a_span_for_every_pass(monkeypatch):
    built, spans = HostRig(1, 2, 4, 2, observed=True), []
    monkeypatch.setattr(built._idle, "add", spans.extend)
    try:
        built.paci()
    finally:
        built.close()
    count = Counter(span.kind for span in spans)
    assert count["F"] == count["B"] == count["send"] == 4 and count["iteration"] == 1
    assert not torch.distributed.is_initialized()


def test_the_result_has_three_stages_and_the_largest_ratio():
    run = host.HostRun(stages=4, microbatches=2, accum=1, repetitions=1, profile=3)
    result = host.measure(run)
    assert [stage["stage"] for stage in result["stages"]] == [0, 2, 3]
    assert result["ratio"] == max(stage["ratio"] for stage in result["stages"])
    assert result["ratio_with_posting"] == max(
        stage["with_posting"]["ratio"] for stage in result["stages"]
    )
    assert min(stage["paci_us"] for stage in result["stages"]) > 0
    assert all(stage["telemetry_us"] != 0 for stage in result["stages"])
    assert result["parameters"]["accum"] == 1
    text = host_command.table(result)
    assert f"largest ratio: {result['ratio']:.3f}" in text and "ncalls" in text
