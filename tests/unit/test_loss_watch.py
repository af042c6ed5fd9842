"""megatron_paci/loss_watch.py, late_values.py, loss_warning.py: a loss that goes wrong is told."""

from __future__ import annotations

import math
import random

import pytest
import torch

from megatron_paci.late_values import BATCH, LateValues
from megatron_paci.loss_warning import LossWarning
from megatron_paci.loss_watch import (
    CHECKS,
    ERRORS,
    FALL,
    RISE,
    WINDOW,
    Finding,
    LossWatch,
    warning,
)
from megatron_paci.schedule import StageSchedule


def watched(losses, **options):
    """What a watch says of losses, and the watch."""
    watch = LossWatch(**options)
    found = [watch.add(number, loss) for number, loss in enumerate(losses, start=1)]
    return [each for each in found if each is not None], watch


def test_a_rise_is_told_once_and_again_after_it_has_gone():
    # Windows of two iterations; 4.25 is 6.25% above 4.
    low, high = [4.0] * 4, [4.25] * 6
    found, _ = watched([8.0, 6.0, *low, *high, *low, *high], window=2)
    assert found == [Finding("risen", 7, 8, 4.25, 4.0, 4), Finding("risen", 17, 18, 4.25, 4.0, 4)]


def test_an_episode_ends_below_half_of_what_begins_one():
    above, between, below = 4 * (1 + 1.2 * RISE), 4 * (1 + 0.6 * RISE), 4 * (1 + 0.4 * RISE)
    found, _ = watched([4.0] * 2 + [above] * 2 + [between] * 2 + [above] * 2, window=2)
    assert len(found) == 1
    found, _ = watched([4.0] * 2 + [above] * 2 + [below] * 2 + [above] * 2, window=2)
    assert len(found) == 2


@pytest.mark.parametrize("share, warns", [(0.99 * RISE, False), (1.01 * RISE, True)])
def test_how_far_it_may_rise(share, warns):
    found, watch = watched([4.0] * WINDOW + [4 * (1 + share)] * WINDOW)
    assert bool(found) == warns
    assert watch.largest == pytest.approx(share)


def test_a_fall_and_a_level_later_on_are_nothing():
    found, watch = watched([11 - 8 * i / 1000 for i in range(1000)] + [3.0] * 2000)
    assert found == [] and watch.largest == 0
    assert watch.least_fall == pytest.approx(1 - (11 - 0.008 * 124.5) / (11 - 0.008 * 49.5))


def test_a_loss_near_zero_may_rise_by_as_much_as_one_near_1():
    assert watched([0.01] * WINDOW + [0.05] * WINDOW)[0] == []
    assert len(watched([0.01] * WINDOW + [0.07] * WINDOW)[0]) == 1


def stuck(first, at, later):
    """A loss that begins at ``first``, is at ``at`` by the first check, and then at ``later``."""
    return [first] + [at] * (CHECKS[0] - 1) + [later] * CHECKS[2]


@pytest.mark.parametrize("fall, told", [(0.9 * FALL, True), (1.1 * FALL, False)])
def test_how_far_it_has_to_fall_while_iterations_double(fall, told):
    level = [4.0] * 75
    found, watch = watched([6.0] + level[1:] + [4 * (1 - fall)] * 500)
    assert watch.least_fall == pytest.approx(0)  # from 150 to 300
    first = [each for each in found if each.last == 150]
    assert first == ([Finding("stuck", 101, 150, pytest.approx(4 * (1 - fall)), 4.0, 75)]
                     if told else [])
    assert len(found) == 1  # once


@pytest.mark.parametrize("losses", [
    stuck(4.0, 3.5, 3.5),  # begins with trained weights, or cannot learn
    stuck(4.0, 0.9, 0.9),  # has learned it all
])
def test_what_is_not_stuck(losses):
    assert watched(losses)[0] == []


def test_a_run_that_goes_on_from_a_checkpoint_is_not_judged_by_how_it_falls():
    watch = LossWatch()
    found = [watch.add(number, loss) for number, loss in enumerate(stuck(6.0, 3.0, 3.0), start=20)]
    assert found == [None] * len(found) and watch.least_fall == math.inf
    assert len(watched(stuck(6.0, 3.0, 3.0))[0]) == 1


def test_the_noise_of_small_batches_is_none():
    rng = random.Random("noise")
    found, _ = watched([3.0] + [3 + rng.gauss(0, 1) for _ in range(20_000)])
    assert found == []
    # Without that rule it would be: the means lie further apart than 5%.
    means = [sum(rng.gauss(3, 1) for _ in range(WINDOW)) / WINDOW for _ in range(400)]
    assert max(means) > (1 + RISE) * min(means)
    assert ERRORS * 1 / math.sqrt(WINDOW) > max(means) - min(means)


def test_losses_that_are_not_finite_are_left_out():
    found, watch = watched([4.0] * WINDOW + [math.nan, math.inf] * WINDOW + [4.0] * WINDOW)
    assert found == [] and watch.largest == 0


def test_the_warning_names_numbers_and_remedies():
    text = warning(Finding("risen", 151, 200, 3.25, 3.0, 120), accumulation=4, drift_bound=2)
    stuck = warning(Finding("stuck", 101, 150, 3.0, 3.01, 75), accumulation=4, drift_bound=2)
    assert stuck.startswith("the loss hardly falls: its mean over iterations 101 to 150 is 3.0")
    for part in ("the loss has risen: its mean over iterations 151 to 200 is 3.2500, and was 3.0",
                 "at iteration 120",
                 "up to 2 optimizer steps late (--paci-accum 4)", "a larger --paci-accum",
                 "--paci-accum-schedule sync:0,", "lower the learning rate",
                 "python -m megatron_paci compare --short"):
        assert part in text


def test_values_come_late_in_their_order():
    late, arrived = LateValues(), []
    for number in range(2 * BATCH + 3):
        arrived.append(late.put(number, torch.tensor(number / 2)))
    assert [len(each) for each in arrived] == [0] * 9 + [10] + [0] * 9 + [10] + [0] * 3
    assert sum(arrived, []) == [(number, number / 2) for number in range(2 * BATCH)]


class Device:
    """Stands for torch.cuda: an event is over once ``over`` is set."""

    over = False

    class Event:
        def record(self):
            pass

        def query(self):
            return Device.over


class OnDevice(torch.Tensor):
    is_cuda = True


def test_nobody_waits_for_a_device_that_is_behind(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Device.Event)
    late = LateValues()
    for number in range(2 * BATCH):
        assert late.put(number, torch.tensor(float(number)).as_subclass(OnDevice)) == []
    Device.over = True
    arrived = late.put(2 * BATCH, torch.tensor(0.0).as_subclass(OnDevice))
    assert arrived == [(number, float(number)) for number in range(2 * BATCH)]


def test_a_warning_is_logged_with_the_delay_of_the_first_stage(caplog):
    watch, schedule = LossWarning(), StageSchedule(3, 4, 2)
    for number in range(1, 2 * WINDOW + 1):
        loss = torch.tensor(4.0 if number <= WINDOW else 5.0, requires_grad=True)
        watch.iteration(number, {"lm loss": loss, "other": torch.tensor(float(number))}, schedule)
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.name == "megatron_paci.loss_warning"
    assert "up to 2 optimizer steps late (--paci-accum 2)" in record.message
