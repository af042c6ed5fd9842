"""The experiments on convergence but for training: settings, virtual time, results, tables."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from megatron_paci.convergence.clock import best_flush, first_below, times
from megatron_paci.convergence.command import Folders, missing
from megatron_paci.convergence.data import Text, microbatches, shuffled
from megatron_paci.convergence.experiments import EXPERIMENTS, Experiment, flush, paci
from megatron_paci.convergence.figures import FIGURES
from megatron_paci.convergence.report import interval, renewed, table, time_table, watch_table
from megatron_paci.convergence.results import Results
from megatron_paci.convergence.settings import Settings
from megatron_paci.simulate.schedules import plan
from megatron_paci.simulate.timing import Costs, timeline

ROOT = Path(__file__).resolve().parents[2]


def write(results: Results, settings: Settings, validation, **changes) -> None:
    result = {"settings": asdict(settings), "validation": validation, "diverged": None,
              "deviation": 0.1, "drift_max": 2,
              "losses": [9.0, *[4.0] * 17, 2.0, 3.0]} | changes
    results.path(settings).write_text(json.dumps(result))


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
        sweep = experiment.name in ("start_rate", "muon", "muon_momentum", "nadam", "sgd")
        assert len(experiment.seeded()) == (1 if sweep else 3) * len(experiment.runs)
        for label, settings in experiment.runs.items():
            baseline = experiment.runs[experiment.baseline(label)]
            assert baseline.schedule == "sync", label
            same = {"batch", "iterations", "layers", "hidden", "stages", "sequence"}
            same -= {"stages"} if experiment.name == "depth" else set()
            same -= {"iterations"} if "updates" in label else set()  # the label says so
            same |= {"optimizer", "beta1"} if label != "1F1B, AdamW" else set()
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


def test_runs_without_a_result_are_missing_each_once(tmp_path):
    runs = {"1F1B": flush(), "PACI a=4": paci(4)}
    experiment = Experiment("few", "?", runs, {})
    folders = Folders(results=Results(tmp_path), work=tmp_path)
    assert len(missing([experiment, experiment], folders)) == 6
    write(folders.results, replace(flush(), seed=2), [[500, 2.0]])
    assert [name for name, _ in missing([experiment], folders)] == [
        "few: 1F1B, seed 1", "few: PACI a=4, seed 1", "few: PACI a=4, seed 2",
        "few: 1F1B, seed 3", "few: PACI a=4, seed 3",
    ]


def test_results_of_another_default_are_refused(tmp_path):
    results = Results(tmp_path)
    write(results, flush(), [[500, 2.0]])
    result = json.loads(results.path(flush()).read_text())
    del result["settings"]["stash"]  # a field that came later
    results.path(flush()).write_text(json.dumps(result))
    assert results.get(flush())["drift_max"] == 2
    result["settings"]["hidden"] = 64
    results.path(flush()).write_text(json.dumps(result))
    with pytest.raises(ValueError, match="trained with another hidden"):
        results.get(flush())


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_every_run_apart_from_the_others(tmp_path, name):
    experiment, results = EXPERIMENTS[name], Results(tmp_path)
    for settings in experiment.runs.values():
        count, end = settings.validations, settings.iterations
        write(results, settings, [[end * (i + 1) // count, 3.0 - i / 10] for i in range(count)])
    axes = Figure().subplots()
    FIGURES[name](axes, experiment, results)
    shown = [line for line in axes.lines if not line.get_label().startswith("_")]
    assert len({(line.get_color(), line.get_linestyle()) for line in shown}) == len(shown)
    dots = sum(line.get_linestyle() == "None" for line in axes.lines)
    level = 1 if name == "depth" else 0  # 1F1B, which is no matter of the number of stages
    assert len(experiment.runs) == (dots + level if dots else len(shown))


def test_a_table_compares_seed_by_seed(tmp_path):
    experiment = Experiment("few", "?", {"1F1B": flush(), "PACI a=4": paci(4)}, {})
    results = Results(tmp_path)
    assert "python docs/convergence.py few" in table(experiment, results)
    for seed, sync, stream in ((1, 2.0, 2.1), (2, 3.0, 3.2), (3, 4.0, 4.3)):
        write(results, replace(flush(), seed=seed), [[500, sync]])
        write(results, replace(paci(4), seed=seed), [[500, stream]])
    assert table(experiment, results).splitlines()[2:] == [
        "| 1F1B | 3.0000 ± 1.0000 |  | 2.5000 ± 0.0000 | 0.1000 | 2 | 0 of 3 |",
        "| PACI a=4 | 3.2000 ± 1.1000 | +0.2000 ± 0.2484 | 2.5000 ± 0.0000 | 0.1000 | 2 | 0 of 3 |",
    ]
    write(results, replace(paci(4), seed=3), [], diverged=7)
    assert table(experiment, results).splitlines()[3] == (
        "| PACI a=4 | 2.6500 ± 0.7778 | +0.1500 ± 0.6353 | 2.5000 ± 0.0000 | 0.1000 | 2 | 1 of 3 |"
    )


def test_the_interval_of_a_mean():
    middle, half = interval([1.0, 2.0, 3.0])
    assert middle == 2.0 and half == pytest.approx(4.303 / math.sqrt(3))


def test_the_table_of_times_compares_with_the_best_1f1b(tmp_path):
    parts = {"iterations": 4, "warmup": 1, "validations": 4}
    runs = {"1F1B": flush(**parts), "a=16": paci(16, **parts)}
    results = Results(tmp_path)
    losses = [[1, 5.0], [2, 4.0], [3, 3.5], [4, 3.0]]
    write(results, runs["1F1B"], losses)
    write(results, runs["a=16"], losses)
    lines = time_table(Experiment("time", "?", runs, {}, seeds=1), results).splitlines()
    # Drained after every iteration: as fast as 1F1B with microbatches of the same size.
    assert "| a=16 | 100% |" in lines[2] and lines[2].split(" | ")[3] == "1.00, m=16"


def test_what_the_warning_would_have_said_of_the_runs(tmp_path):
    """A loss of 6 that is then at 3 and falls to half, stays there, or rises."""
    rate, results = EXPERIMENTS["rate"], Results(tmp_path)
    labels = list(rate.runs)[:3]  # compared with the first one
    halves = {"falls": 1.5, "stays": 3.0, "rises": 3.5, "diverges": 20.0}
    for label, (name, last) in zip(labels * 2, halves.items()):
        # 300 iterations, stored in pairs. From 75 to 150 none falls, which is told of all.
        losses = [6.0] + [3.0] * 74 + [last] * 75
        seed = 1 if name in ("falls", "stays", "rises") else 2
        write(results, replace(rate.runs[label], seed=seed), [[300, last]], losses=losses,
              iterations_per_loss=2, diverged=300 if name == "diverges" else None)
    assert watch_table(results).splitlines()[2:] == [
        "| end less than 0.3 nats behind 1F1B | 1 | 0.0% | 0.0% | 0 of 1 | 1 of 1 |",
        "| end farther behind | 2 | 16.7% | -16.7% | 1 of 2 | 2 of 2 |",
        "| diverge | 1 | 566.7% | -566.7% | 1 of 1 | 1 of 1 |",
    ]
    # One that ends before its first check, of an optimizer whose 1F1B learns badly.
    sgd = next(iter(EXPERIMENTS["sgd"].runs.values()))
    write(results, sgd, [[300, 3.0]], losses=[6.0] * 60, iterations_per_loss=1)
    assert watch_table(results).splitlines()[4:] == [
        "| have SGD | 1 | 0.0% | - | 0 of 1 | 0 of 1 |",
        "| diverge | 1 | 566.7% | -566.7% | 1 of 1 | 1 of 1 |",
    ]
    assert watch_table(Results(tmp_path / "none")) == "No runs yet.\n"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import convergence
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return convergence


@pytest.mark.parametrize("arguments, reason", [
    (["nothing"], "no experiment nothing"),
    (["rate", "--jobs", "0"], "give at least 1"),
    ([], "name an experiment"),
])
def test_bad_command_lines_are_refused(script, capsys, arguments, reason):
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert reason in capsys.readouterr().err


def test_the_page_has_every_experiment_and_is_in_step(script):
    text = script.PAGE.read_text(encoding="utf-8")
    assert renewed(text, script.FOLDERS.results) == text, "python docs/convergence.py --report"
    for name in EXPERIMENTS:
        assert f"<!-- table {name}: python docs/convergence.py --report -->" in text
