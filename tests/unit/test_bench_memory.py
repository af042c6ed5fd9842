"""What is counted of memory, and how two runs are compared; test_oracles.py counts real ones."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from megatron_paci import record
from megatron_paci.bench import memory, memory_command
from megatron_paci.bench.memory import MemoryRun, compare
from megatron_paci.bench.message_memory import MessageMeter
from megatron_paci.schedule import StageSchedule
from megatron_paci.simulate.reading import Reader


def read(*flags: str) -> tuple[MemoryRun, list[str]]:
    parser = argparse.ArgumentParser()
    memory_command.add_arguments(parser)
    reader = Reader()
    return memory_command.read(parser.parse_args(flags), reader), reader.problems


def test_a_message_counts_as_long_as_somebody_holds_its_memory():
    meter = MessageMeter()
    one, two = torch.zeros(10), torch.zeros(20)  # 40 and 80 bytes
    meter.note(one, None)
    meter.note(one.detach(), two[:5])  # the same memory, and a part of a larger one
    assert (meter.peak, meter.largest, meter.count) == (120, 80, 3)
    kept = two.detach()
    two.data = torch.zeros(1)  # as a schedule frees an output: ``kept`` still holds the memory
    del one
    meter.note(torch.zeros(5))
    assert meter.peak == 120
    del kept
    meter.note(torch.zeros(30))
    assert meter.figures() == {"peak": 120, "largest": 120, "count": 5}
    more = torch.zeros(10)
    meter.note(torch.zeros(30), more)
    assert meter.peak == 160


def test_the_meter_sees_what_megatrons_communicator_sends_and_receives():
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    received = torch.zeros(3)

    def communicate(self, **kwargs):
        return received, None, {}

    original = P2PCommunicator._communicate
    P2PCommunicator._communicate = communicate
    meter = MessageMeter()
    meter.install()
    try:
        result = object.__new__(P2PCommunicator)._communicate(
            tensor_send_next=None, tensor_send_prev=torch.zeros(4), recv_prev=True,
        )
    finally:
        meter.uninstall()
        P2PCommunicator._communicate = original
    assert result == (received, None, {})
    assert meter.figures() == {"peak": 28, "largest": 16, "count": 2}


def test_both_runs_differ_in_the_schedule_alone():
    run = MemoryRun(stages=2, accum=4, megatron_args="--bf16")
    ours, theirs = (run.run(name, Path("a b")).arguments(Path("x")) for name in ("paci", "1f1b"))
    start = ours.index("--paci-accum")
    assert ours[start:start + 2] == ["--paci-accum", "4"]
    del ours[start:start + 2]
    ours[ours.index("paci")] = "1f1b"
    assert ours == theirs
    assert ours[-1] == "--bf16" and ours.count("a b") == 2  # the folder of both counts


def test_microbatches_in_flight_are_those_of_the_schedules():
    run = MemoryRun(stages=4, microbatches=2)
    assert run.in_flight("paci") == [StageSchedule(s, 4, 1).depth for s in range(4)]
    assert run.in_flight("1f1b") == [2, 2, 2, 1]
    assert MemoryRun(extra_in_flight=2).in_flight("paci") == [10, 7, 4, 1]


def figures(weights: int, activations: int) -> dict[str, int]:
    return {
        "parameters": weights, "gradients": weights, "optimizer": 2 * weights,
        "activations_peak": activations, "messages_peak": 3, "message": 1,
    }


def test_stages_are_compared_one_by_one():
    result = compare(
        MemoryRun(stages=2, extra_in_flight=1),
        {
            "1f1b": [figures(100, 40), figures(200, 20)],
            "paci": [figures(100, 50), figures(150, 20)],
        },
    )
    assert result["weights_ratio"] == [1, 0.75] and result["weights_ratio_max"] == 1
    assert result["activations_ratio"] == [1.25, 1] and result["activations_ratio_max"] == 1.25
    assert result["activations_limit"] == [3 / 2, 1]
    text = memory_command.table(result)
    assert "weights, PACI / 1F1B per stage: 1.000, 0.750" in text
    assert [line.split() for line in text.splitlines()][4] == [
        "1", "paci", "150", "150", "300", "20", "3", "1",
    ]


def test_the_command_line_is_checked():
    assert read() == (MemoryRun(accum=8), [])
    run, problems = read("--stages", "3", "--microbatches", "6", "--accum", "2")
    assert (run, problems) == (MemoryRun(stages=3, microbatches=6, accum=2), [])
    for flags, problem in (
        (("--accum", "3"), "--accum 3: does not divide --microbatches 8"),
        (("--stages", "7", "--microbatches", "2"), "give 3 or more"),
        (("--extra-in-flight", "-1"), "--extra-in-flight -1: too small"),
        (("--megatron-args", "'"), "--megatron-args: no closing quotation"),
    ):
        [found] = read(*flags)[1]
        assert problem in found.lower()


def test_activations_are_counted_while_the_command_says_so():
    assert memory.COUNTED_ITERATIONS == record.COUNTED_ITERATIONS
