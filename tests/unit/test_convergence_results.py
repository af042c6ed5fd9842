"""The experiments on convergence after training: results, tables, figures, the command."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from megatron_paci.convergence.command import Folders, missing
from megatron_paci.convergence.experiments import EXPERIMENTS, Experiment
from megatron_paci.convergence.figures import FIGURES
from megatron_paci.convergence.report import (
    interval,
    renewed,
    repeated,
    table,
    time_table,
    watch_table,
)
from megatron_paci.convergence.results import Results
from megatron_paci.convergence.runs import flush, paci
from megatron_paci.convergence.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def write(results: Results, settings: Settings, validation, **changes) -> None:
    result = {"settings": asdict(settings), "validation": validation, "diverged": None,
              "deviation": 0.1, "drift_max": 2,
              "losses": [9.0, *[4.0] * 17, 2.0, 3.0]} | changes
    results.path(settings).write_text(json.dumps(result))


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
    level = 2 if name == "depth" else 0  # 1F1B, which is no matter of the number of stages
    assert len(experiment.runs) == (dots + level if dots else len(shown))


def test_a_figure_tells_of_runs_that_diverged(tmp_path):
    experiment, results = EXPERIMENTS["stability"], Results(tmp_path)
    for settings in experiment.runs.values():
        for seed in (1, 2):
            broken = settings.lr > 0.1 and (settings.schedule == "sync" or seed == 2)
            write(results, replace(settings, seed=seed), [] if broken else [[120, 3.0]],
                  diverged=5 if broken else None)
    axes = Figure().subplots()
    FIGURES["stability"](axes, experiment, results)
    assert [(text.get_text(), text.xy[0]) for text in axes.texts] == [
        ("2 of 2 diverged", 0.256), ("1 of 2 diverged", 0.256), ("1 of 2 diverged", 0.256)
    ]
    lines = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    assert lines["1F1B"] == [0.016, 0.064]
    assert lines["PACI a=4"] == [0.016, 0.064, 0.256]


def test_a_level_line_leaves_out_seeds_that_diverged(tmp_path):
    experiment, results = EXPERIMENTS["depth"], Results(tmp_path)
    write(results, experiment.runs["1F1B"], [[180, 2.5]])
    write(results, replace(experiment.runs["1F1B"], seed=2), [], diverged=5)
    axes = Figure().subplots()
    FIGURES["depth"](axes, experiment, results)
    assert [list(line.get_ydata()) for line in axes.lines] == [[2.5, 2.5]]


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
    (["--again"], "name an experiment"),
    (["rate", "--again", "--report"], "leaves the page as it is"),
])
def test_bad_command_lines_are_refused(script, capsys, arguments, reason):
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert reason in capsys.readouterr().err


def test_runs_made_again_are_compared_with_those_kept(tmp_path):
    experiment = Experiment("rate", "?", {"1F1B": flush(), "a=4": paci(4)}, {}, seeds=2)
    kept, again = Results(tmp_path), Results(tmp_path / "again")
    again.folder.mkdir()
    for seed in (1, 2):
        for settings in experiment.runs.values():
            write(kept, replace(settings, seed=seed), [[500, 3.0]])
    assert repeated(experiment, again, kept) == (
        "0 of 4 runs are done again; 0 with all losses as kept"
    )
    write(again, flush(), [[500, 3.0]])
    write(again, paci(4), [[500, 3.0]], losses=[9.0])
    write(again, replace(paci(4), seed=2), [[500, 2.75]])
    assert repeated(experiment, again, kept) == (
        "3 of 4 runs are done again; 1 with all losses as kept, the validation losses of the "
        "others end at most 0.25000 apart"
    )
    write(again, replace(paci(4), seed=2), [], diverged=3)
    assert repeated(experiment, again, kept).endswith(
        "0.00000 apart; 1 diverged here or there alone"
    )


def test_experiments_run_again_leave_what_is_kept(script, tmp_path, monkeypatch, capsys):
    experiment = Experiment("rate", "?", {"1F1B": flush()}, {}, seeds=1)
    monkeypatch.setattr(script, "EXPERIMENTS", {"rate": experiment})
    monkeypatch.setattr(script, "AGAIN", tmp_path / "again")
    monkeypatch.setattr(script, "prepare_text", lambda folder: None)

    def train(runs, folders, *, jobs):
        assert runs == [("rate: 1F1B, seed 1", flush())] and folders.work == tmp_path / "again"
        folders.results.folder.mkdir(parents=True)
        write(folders.results, flush(), [[360, 3.0]])
        return []

    monkeypatch.setattr(script, "run", train)
    assert script.main(["rate", "--again"]) == 0
    told = capsys.readouterr().out
    assert "| 1F1B | 3.0000 |" in told and "1 of 1 runs are done again; 0 with" in told
    assert str(tmp_path / "again/convergence-rate.png") in told


def test_the_page_has_every_experiment_and_is_in_step(script):
    text = script.PAGE.read_text(encoding="utf-8")
    assert renewed(text, script.FOLDERS.results) == text, "python docs/convergence.py --report"
    for name in EXPERIMENTS:
        assert f"<!-- table {name}: python docs/convergence.py --report -->" in text
