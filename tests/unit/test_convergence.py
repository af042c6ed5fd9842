"""The experiments on convergence before training: settings, virtual time, data."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest

from megatron_paci.convergence.clock import best_flush, first_below, times
from megatron_paci.convergence.data import Text, microbatches, shuffled
from megatron_paci.convergence.experiments import EXPERIMENTS
from megatron_paci.convergence.runs import flush, paci
from megatron_paci.convergence.settings import Settings
from megatron_paci.simulate.schedules import plan
from megatron_paci.simulate.timing import Costs, timeline

ROOT = Path(__file__).resolve().parents[2]


def test_a_schedule_says_what_holds_from_which_sample_on():
    settings = Settings(schedule="sync:0,4:64,8:320", microbatch=4)
    assert settings.phases == {0: 0, 64: 4, 320: 8}
    assert [settings.accumulation_at(i) for i in (0, 1, 2, 9, 10, 11)] == [0, 0, 4, 4, 8, 8]
    assert Settings(schedule="16").phases == {0: 16}


@pytest.mark.parametrize("wrong, reason", [
    ({"schedule": "fast"}, "is not an accumulation"),
    ({"schedule": "0"}, "is not an accumulation"),
    ({"schedule": "4:32"}, "nothing holds from sample 0"),
    ({"schedule": "sync:0,4:64,8:64"}, "does not begin after"),
    ({"schedule": "sync:0,4:65", "microbatch": 8}, "not at the end of an iteration"),
    ({"schedule": "3"}, "does not divide the 16"),
    ({"microbatch": 5}, "microbatch 5 does not divide batch 32"),
    ({"stages": 3}, "stages 3 does not divide layers"),
    ({"iterations": 0}, "iterations 0: give at least 1"),
    ({"validations": 7}, "validations 7 does not divide iterations"),
    ({"optimizer": "adagrad"}, "none of adam"),
    ({"clip": "half"}, "none of none"),
    ({"clip": "local", "clip_grad": 0.0}, "larger than 0"),
    ({"lr": 0.0}, "larger than 0"),
    ({"warmup": 360}, "shorter than the run"),
])
def test_settings_that_cannot_be_run_are_refused(wrong, reason):
    with pytest.raises(ValueError, match=reason):
        Settings(**wrong)


def test_the_name_of_a_run_depends_on_what_differs_from_the_default():
    settings = [Settings(), Settings(seed=2), Settings(lr=2e-3), Settings(lr=3e-3)]
    assert len({each.key() for each in settings}) == len(settings)
    assert Settings(seed=1).key() == Settings().key()


def test_experiments_compare_like_with_like():
    for experiment in EXPERIMENTS.values():
        sweep = experiment.name in (
            "discount", "start_rate", "muon", "muon_momentum", "nadam", "sgd", "time_longest"
        )
        assert len(experiment.seeded()) == (1 if sweep else 3) * len(experiment.runs)
        for label, settings in experiment.runs.items():
            baseline = experiment.runs[experiment.baseline(label)]
            assert baseline.schedule == "sync", label
            same = {"batch", "iterations", "layers", "hidden", "stages", "sequence"}
            same -= {"stages"} if experiment.name == "depth" else set()
            same -= {"iterations"} if "updates" in label else set()  # the label says so
            other = label in ("1F1B, AdamW", "1F1B, NAdam")  # and the other one is the baseline
            same |= set() if other else {"optimizer", "beta1"}
            for name in same:
                assert getattr(settings, name) == getattr(baseline, name), (label, name)


def simulated(name: str, settings: Settings, overhead: Fraction, iterations: int) -> Fraction:
    found = plan(name, settings.stages, settings.num_microbatches, iterations=iterations)
    one = settings.microbatch + overhead * settings.batch
    costs = Costs.equal(settings.stages, forward=one, backward_input=one, backward_weight=one)
    events = timeline(found.orders, found.path, costs, joint_steps=found.joint_steps)
    return max(event.end for event in events)


@pytest.mark.parametrize("microbatch", [2, 8, 32])
@pytest.mark.parametrize("stages", [4, 8])
def test_virtual_time_is_that_of_the_simulator(stages, microbatch):
    overhead, parts = Fraction(1, 50), {"stages": stages, "iterations": 20, "warmup": 1}
    sync = flush(**parts, microbatch=microbatch, validations=4)
    assert times(sync, overhead)[-1] == simulated("1f1b", sync, overhead, 20)
    stream = paci(32 // microbatch, **parts, validations=4)
    assert times(stream, overhead)[-1] == 4 * simulated("paci", stream, overhead, 5)


def test_virtual_time_of_a_synchronous_start():
    start = paci(4, start=5, iterations=20, warmup=1, validations=1)
    clock, pass_time = times(start, Fraction(0)), 3 * 8
    assert clock[4] == 5 * (4 + 7) * pass_time
    assert clock[19] == clock[4] + (15 * 4 + 7) * pass_time


def test_the_best_1f1b_weighs_the_bubble_against_small_microbatches():
    run = flush(iterations=10, warmup=1)
    assert best_flush(run, Fraction(0)).microbatch == 1  # passes cost nothing but their samples
    assert best_flush(run, Fraction(1, 50)).num_microbatches == 16
    assert best_flush(run, Fraction(10)).num_microbatches == 1


def test_when_a_loss_is_reached():
    clock = [Fraction(10 * (i + 1)) for i in range(4)]
    measured = [(1, 4.0), (2, 3.0), (4, 2.0)]
    assert first_below(measured, 3.5, clock) == 15
    assert first_below(measured, 2.0, clock) == 40
    assert first_below(measured, 1.9, clock) is None
    assert first_below(measured, 4.0, clock) is None  # before the first measurement, or then


def test_samples_have_one_order_wherever_they_begin():
    whole = list(islice(shuffled(10, seed=1, first=0), 35))
    assert sorted(whole[:10]) == list(range(10)) == sorted(whole[10:20])
    assert whole[:10] != whole[10:20]
    for first in (7, 10, 23):
        assert list(islice(shuffled(10, seed=1, first=first), 12)) == whole[first:first + 12]
    assert list(islice(shuffled(10, seed=2, first=0), 10)) != whole[:10]


def test_the_first_and_the_last_stage_read_the_same_text(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(41)))
    text = Text(tmp_path / "text", 8)
    assert text.num_sequences == 5
    first, middle, last = microbatches(text, iter([0, 4, 2, 1]), 2, 3)
    tokens, labels = next(first)
    assert tokens.tolist() == [list(range(8)), list(range(32, 40))]
    assert labels.tolist() == [list(range(1, 9)), list(range(33, 41))]
    assert next(middle) is None and next(last)[1].tolist() == labels.tolist()
    (tmp_path / "short").write_bytes(b"12345678")
    with pytest.raises(ValueError, match="a sequence needs 9"):
        Text(tmp_path / "short", 8)
