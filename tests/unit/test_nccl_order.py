"""Order safety: the stream gets to its end under NCCL's rules (tests/nccl_order/rules.py).

The real stage runs alone in this process, one after another of all stages (lone_stage.py): through
warm-up, steady state, reports, evaluations by Megatron's own schedule, a checkpoint, and drains of
streams that have filled and that have not. Once with microbatches of one length, once with
different ones; with router metrics and a tied embedding.

Leaving out links only takes rules away, so what passes with a tied embedding passes without. The
cases without are for what holds there alone.
"""

from __future__ import annotations

import functools
import re

import pytest

from megatron_paci.cpu import CpuDevice
from megatron_paci.report import REPORT_LENGTH
from tests.nccl_order.lone_stage import ITERATION, logs_of_a_pipeline
from tests.nccl_order.rules import (
    Collective,
    HostWait,
    Mark,
    Messages,
    OrderError,
    check,
    without,
)

SHAPES = [(m, a) for m in range(1, 10) for a in range(1, 9) if m % a == 0]
STAGES = range(2, 9)
# With more microbatches in flight per link or a deferred step, fewer shapes.
VARIANTS = [(1, False), (2, False), (0, True), (1, True)]
FEW_SHAPES = ((1, 1), (2, 1), (4, 2), (4, 4), (6, 3))


def training(stage, in_flight: int, microbatches: int) -> None:
    for _ in range(max(2, -(-2 * in_flight // microbatches))):  # twice what fills the pipeline
        stage.train(microbatches)
    stage.evaluate(microbatches, batched=True)
    stage.train(microbatches)
    stage.save()
    stage.train(microbatches)
    stage.evaluate(microbatches, batched=False)
    stage.train(microbatches)


@functools.cache
def logs_of(num_stages: int, variable: bool, shapes=tuple(SHAPES), extra=0, deferred=False):
    in_flight = num_stages + extra * (num_stages - 1)
    with CpuDevice():
        return logs_of_a_pipeline(
            num_stages, shapes, lambda stage, m: training(stage, in_flight, m),
            variable=variable, tied=True, routers=True, extra_in_flight=extra, defer_step=deferred,
        )


def untied(logs):
    return [without(log, "PACI_TIED") for log in logs]


def at_iterations(log):
    """Let the host wait for its whole device at the end of every iteration."""
    return [HostWait(whole_device=True) if event == Mark(ITERATION) else event for event in log]


@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "variable"])
@pytest.mark.parametrize("num_stages", STAGES)
def test_the_stream_gets_to_its_end(num_stages, variable):
    for (m, a), logs in logs_of(num_stages, variable).items():
        try:
            check(logs)
            # With one hardware queue a tied embedding needs windows of this length.
            check(logs if num_stages <= 4 * a else untied(logs), one_queue=True)
            check([at_iterations(log) for log in untied(logs)], one_queue=True)
        except OrderError as error:
            pytest.fail(f"N={num_stages} m={m} a={a}: {error}")


@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "variable"])
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("extra, deferred", VARIANTS)
def test_the_stream_gets_to_its_end_with_more_in_flight_and_deferred_steps(
    extra, deferred, num_stages, variable
):
    logs_by_shape = logs_of(num_stages, variable, FEW_SHAPES, extra, deferred)
    for (m, a), logs in logs_by_shape.items():
        try:
            check(logs)
            if not extra:
                check(untied(logs), one_queue=True)
                if num_stages + deferred <= 4 * a:
                    check(logs, one_queue=True)
            if m > extra:  # else more forwards are sent than an iteration takes
                check([at_iterations(log) for log in untied(logs)])
        except OrderError as error:
            pytest.fail(f"N={num_stages} s={extra} deferred={deferred} m={m} a={a}: {error}")


def test_one_hardware_queue_cannot_order_more_forwards_of_a_link():
    """Why they are refused with CUDA_DEVICE_MAX_CONNECTIONS=1."""
    for logs in logs_of(2, False, FEW_SHAPES, 2).values():
        with pytest.raises(OrderError):
            check(untied(logs), one_queue=True)


@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "variable"])
def test_one_stage_may_wait_for_its_device_anywhere(variable):
    """Nothing is posted ahead whose message needs what this stage does next."""
    variants = (((4, 2),), 1, False), (((2, 1),), 0, True)
    cases = [((), (1, 1)), ((), (4, 2)), (variants[0], (4, 2)), (variants[1], (2, 1))]
    for given, shape in cases:
        logs = untied(logs_of(3, variable, *given)[shape])
        for rank, log in enumerate(logs):
            for position in range(len(log)):
                waits = [*log[:position], HostWait(whole_device=True), *log[position:]]
                check([*logs[:rank], waits, *logs[rank + 1:]])


@pytest.mark.parametrize("num_stages", STAGES)
def test_a_host_that_waits_for_every_message_hangs(num_stages):
    """So it does with CUDA_LAUNCH_BLOCKING=1; docs/reliability.md says that it must not be set."""
    for logs in logs_of(num_stages, False).values():
        blocking = [
            [each for event in log for each in (
                (event, HostWait(whole_device=True)) if isinstance(event, Messages) else (event,)
            )]
            for log in untied(logs)
        ]
        with pytest.raises(OrderError):
            check(blocking)


# Planted faults: the real logs of three stages, changed in one place.


def one_communicator_for_both_directions(logs):
    """The messages of a pair of neighbours share a group."""

    def joined(rank, event):
        if isinstance(event, Messages) and re.match("PACI_(FORWARD|BACKWARD)", event.group):
            return event._replace(group=f"PAIR {sorted((rank, event.parts[0].peer))}")
        return event

    return [[joined(rank, event) for event in log] for rank, log in enumerate(logs)]


def groups_that_end_in_the_world(logs):
    """Megatron's communicator sends over the world group if the sender is not its first rank."""
    return [
        [event._replace(group="world") if isinstance(event, Messages)
         and event.group.startswith("PACI_") else event for event in log]
        for log in logs
    ]


def place(log, kind, group, number, condition=lambda event: True):
    """Return the position of the ``number``-th event of a kind in a group."""
    found = [position for position, event in enumerate(log) if isinstance(event, kind)
             and event.group.startswith(group) and condition(event)]
    return found[number]


def is_send(event):
    return event.parts[0].sends


def is_report(event):
    return is_send(event) and event.parts[0].num_bytes == 8 * REPORT_LENGTH


def other_bytes(logs):
    position = place(logs[1], Messages, "PACI_BACKWARD", 2, is_report)
    event = logs[1][position]
    logs[1][position] = event._replace(parts=(event.parts[0]._replace(num_bytes=48),))
    return logs


def a_missing_send(logs):
    position = place(logs[2], Messages, "PACI_BACKWARD", -1, is_send)
    logs[2] = logs[2][:position]
    return logs


def a_report_before_its_gradient(logs):
    report = place(logs[1], Messages, "PACI_BACKWARD", 2, is_report)
    gradient = max(p for p in range(report) if isinstance(logs[1][p], Messages)
                   and logs[1][p].group == logs[1][report].group)
    log = logs[1]
    log[gradient], log[report] = log[report], log[gradient]
    return logs


def a_collective_over_the_stages(logs):
    """All of them enter it before their fourth forward, for which most need a message."""
    for log in logs:
        log.insert(log.index(Mark("F3")), Collective("world", "all_reduce", (0, 1, 2), 4))
        log.insert(log.index(Mark("F3")), HostWait(whole_device=True))
    return logs


def two_stages_that_wait_for_their_devices(logs):
    """Each has posted a receive ahead for what the other one sends after its wait.

    The first stage has one for gradient 3, which the second one computes after forward 4. That one
    has one for forward 5, which the first one computes after its third backward.
    """
    third = [position for position, event in enumerate(logs[0]) if event == Mark("B")][2]
    logs[0].insert(third, HostWait(whole_device=True))
    logs[1].insert(logs[1].index(Mark("F4")), HostWait(whole_device=True))
    return logs


FAULTS = {
    one_communicator_for_both_directions: "the host is at event",
    groups_that_end_in_the_world: "the host is at event",
    other_bytes: "has posted (48|56) bytes, rank . (56|48) bytes",
    a_missing_send: "the host is at event",
    a_report_before_its_gradient: "has posted (8|56) bytes, rank . (56|8) bytes",
    a_collective_over_the_stages: "the host is at event",
    two_stages_that_wait_for_their_devices: "the host is at event",
}


@pytest.mark.parametrize(("fault", "found"), FAULTS.items(), ids=[f.__name__ for f in FAULTS])
def test_a_planted_fault_is_found(fault, found):
    logs = [list(log) for log in untied(logs_of(3, False)[4, 2])]
    check(logs)
    with pytest.raises(OrderError, match=found):
        check(fault(logs))
