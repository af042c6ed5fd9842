"""The emulated device on a clock that the test moves."""

from __future__ import annotations

import pytest

from megatron_paci.bench.emulated_device import EmulatedDevice, Pacer


class Machine:
    """A clock, and a sleep that ends ``late`` seconds late."""

    def __init__(self, late: float = 0.0):
        self.time = 100.0
        self.late = late

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds + self.late

    def work(self, seconds: float) -> str:
        self.time += seconds
        return "result"


def pacer(machine: Machine) -> Pacer:
    return Pacer(machine.now, machine.sleep)


def test_work_is_part_of_the_time():
    machine = Machine()
    device = pacer(machine)
    assert device.last(0.5, lambda: machine.work(0.125)) == "result"
    assert machine.time == 100.5 and device.late == [0.0] and device.overrun == 0


def test_what_ends_late_does_not_delay_the_next_pass():
    machine = Machine(late=0.25)
    device = pacer(machine)
    device.last(1.0, lambda: machine.work(0.125))
    assert machine.time == 101.25
    machine.time += 2**-11  # the host, less than a millisecond
    device.last(1.0, lambda: machine.work(0.125))
    assert machine.time == 102.25 + 2**-11  # not 102.5: begun at 101 and the host's time
    assert device.late == [0.25, 0.25]


def test_lateness_is_not_made_up_after_a_wait():
    machine = Machine(late=0.25)
    device = pacer(machine)
    device.last(1.0, lambda: None)
    machine.time += 0.5  # a message that was waited for
    device.last(1.0, lambda: None)
    assert machine.time == 101.25 + 0.5 + 1.25


def test_work_that_takes_too_long_is_counted():
    machine = Machine()
    device = pacer(machine)
    device.last(0.25, lambda: machine.work(1.0))
    assert device.overrun == 1 and device.late == [0.75] and machine.time == 101.0
    device.last(0.25, lambda: None)  # that was no sleep, so it is not made up for
    assert device.overrun == 1 and device.late == [0.75, 0.0] and machine.time == 101.25


def test_the_optimizer_gets_its_step_back():
    class Optimizer:
        def step_with_ready_grads(self):
            return True

    optimizer = Optimizer()
    for seconds in (0.0, 0.001):
        device = EmulatedDevice(forward=0.001, backward=0.002, step=seconds)

        def train(forward_step_func, model, optimizer, seconds=seconds):
            assert bool(vars(optimizer)) == bool(seconds)
            return optimizer.step_with_ready_grads()

        assert device._train(train, None, [None], optimizer) is True
        assert not vars(optimizer)
        assert len(device.result()["late"]) == bool(seconds)
        with pytest.raises(TypeError):
            device._train(train, None, [None], optimizer=optimizer, unknown=1)
        assert not vars(optimizer)
