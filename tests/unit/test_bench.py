"""Benchmarks in real time: what their flags mean, and what is made of what was measured."""

from __future__ import annotations

import json
import shlex
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from megatron_paci.__main__ import main
from megatron_paci.bench import (
    emulated_command,
    real_command,
    scale_command,
    virtual_command,
)
from megatron_paci.bench.emulated import EmulatedRun, add_ratios, next_multiple, schedule_result
from megatron_paci.bench.ranks import RankError
from megatron_paci.bench.real import RealRun, results_of
from megatron_paci.bench.theory import utilization
from megatron_paci.bench.training_run import TrainingRun
from megatron_paci.trace import CAUSES
from megatron_paci.trace_file import TraceError
from tests.unit.compared import write_traces

BENCHMARKS = {
    "emulated": "--stages 2 --microbatches 4",
    "real": "--microbatches 4",
    "scale": "--stages 2,4",
    "virtual": "--stages 2 --microbatches 4 --schedule paci",
}
DOCS = Path(__file__).resolve().parents[2] / "docs"
COMMANDS = {"emulated": emulated_command, "real": real_command, "scale": scale_command,
            "virtual": virtual_command}


def emulated(schedule: str, stages: int = 8, microbatches: int = 4, **parameters) -> EmulatedRun:
    times = {"forward": (0.05,) * stages, "backward": (0.1,) * stages, "step": (0.0,) * stages}
    return EmulatedRun(
        stages=stages, microbatches=microbatches, schedule=schedule, **times | parameters
    )


def real(schedule: str, microbatches: int = 1) -> RealRun:
    return RealRun(stages=2, microbatches=microbatches, schedule=schedule, layers=8, hidden=256,
                   heads=4, sequence=256, vocab=512, micro_batch=1)


def repetition(
    seconds: float, stages: int, *, forward=0.05, backward=0.1, step=0.0
) -> dict:
    """Return what wall.measure makes of one training."""
    cost = {"forward": forward, "backward": backward, "step": step}
    return {
        "seconds_per_iteration": seconds,
        "seconds_by_cause": [dict.fromkeys(CAUSES, 0.0) | {"input": 0.002}] * stages,
        "costs": [cost] * stages,
        "ranks": [{"late": [0.001, 0.002], "overrun": 1}] * stages,
    }


def test_formulas():
    assert utilization("1f1b", 8, 4) == Fraction(4, 11)
    assert utilization("interleaved", 8, 4) == Fraction(8, 15)
    assert utilization("interleaved", 4, 4, chunks=3) == Fraction(12, 15)
    assert utilization("paci", 8, 4) == 1
    with pytest.raises(ValueError, match="none of 1f1b"):
        utilization("gpipe", 8, 4)


def test_the_flags_of_a_training():
    run = emulated("interleaved", stages=2, chunks=3, iterations=5, warmup=4)
    flags = run.arguments(Path("out"))
    assert flags[flags.index("--train-iters") + 1] == "11"  # 2 more, the drain is in the last
    assert flags[flags.index("--num-layers") + 1] == "6"
    assert flags[flags.index("--num-virtual-stages-per-pipeline-rank") + 1] == "3"
    assert flags[flags.index("--paci-trace") + 1] == "out/trace"
    assert "--paci-accum" not in flags
    flags = emulated("paci", megatron_args="--bf16").arguments(Path("out"))
    assert flags[flags.index("--paci-accum") + 1] == "4" and flags[-1] == "--bf16"
    assert "--paci-extra-in-flight" not in flags
    more = emulated("paci", extra_in_flight=2)
    assert "--paci-extra-in-flight 2" in " ".join(more.arguments(Path("out")))
    assert (emulated("paci").warmup_iterations, more.warmup_iterations) == (3, 7)
    with pytest.raises(NotImplementedError):
        TrainingRun(stages=1, microbatches=1, schedule="paci").model_flags()


def test_a_chunk_takes_its_share_of_the_time():
    [first, second] = emulated("interleaved", stages=2, step=(0.0, 0.25)).for_ranks(Path("x"))[
        "seconds"
    ]
    assert first == {"forward": 0.025, "backward": 0.05, "step": 0.0}
    assert second["step"] == 0.25


def test_theory_of_equal_and_of_uneven_stages():
    assert emulated("1f1b").theory == pytest.approx(4 / 11)
    assert emulated("paci").theory == pytest.approx(1)
    # The simulator has no answer, the formula does, unless stages are uneven.
    assert emulated("interleaved").theory == pytest.approx(8 / 15)
    uneven = (0.1,) + (0.05,) * 7
    assert emulated("interleaved", forward=uneven).theory is None
    # One stage of two takes twice as long: m microbatches of it, and once the other.
    both = emulated("1f1b", stages=2, forward=(0.05, 0.1), backward=(0.1, 0.2))
    assert both.theory == pytest.approx(4 * 0.3 / (4 * 0.3 + 0.15))
    assert emulated("paci", stages=2, forward=(0.05, 0.1), backward=(0.1, 0.2)).theory == (
        pytest.approx(1)
    )
    # Two steps in an iteration of four microbatches.
    assert emulated("paci", stages=2, step=(0.1, 0.1), accum=2).useful_seconds == (
        pytest.approx([0.8, 0.8])
    )


def test_figures_are_those_of_the_measured_iterations(tmp_path):
    write_traces(tmp_path / "trace", "1f1b", iterations=5)
    for path in (tmp_path / "trace").iterdir():  # slower passes, after them
        line = json.dumps({"kind": "F", "begin": 90, "end": 95, "microbatch": 20})
        path.write_text(path.read_text() + 30 * f"{line}\n")
    found = emulated("1f1b", stages=2, warmup=1, iterations=2).figures(tmp_path)
    assert found["seconds_per_iteration"] == pytest.approx(15.5)
    assert found["seconds_by_cause"][1]["F"] == pytest.approx(4)
    assert found["costs"] == [{"forward": 1.0, "backward": 2.0, "step": 0.5}] * 2
    with pytest.raises(TraceError, match="before iteration 6"):
        emulated("1f1b", stages=2, warmup=1, iterations=5).figures(tmp_path)


def test_results_of_emulated_schedules():
    runs = {"1f1b": emulated("1f1b"), "paci": emulated("paci"),
            "interleaved": emulated("interleaved", microbatches=8)}
    measured = {
        "1f1b": [repetition(seconds, 8) for seconds in (1.65, 1.7, 1.8)],
        "paci": [repetition(seconds, 8) for seconds in (0.66, 0.625, 0.6)],
        "interleaved": [repetition(1.75, 8)] * 3,
    }
    results = {name: schedule_result(run, measured[name]) for name, run in runs.items()}
    add_ratios(runs, measured, results)
    paci = results["paci"]
    assert paci["utilization"] == pytest.approx(0.6 / 0.625)
    assert paci["throughput"] == pytest.approx(4 / 0.625)
    assert paci["ratio"] == pytest.approx(1.7 / 0.625)  # the median of the pairs' ratios
    assert paci["ratio_theory"] == pytest.approx(2.75)
    assert paci["seconds_per_iteration"] == [0.66, 0.625, 0.6]
    assert paci["overrun"] == 24 and paci["late_ms"] == {"median": 1.5, "max": 2.0}
    assert paci["seconds_by_cause"][7]["input"] == 0.002
    assert results["1f1b"]["ratio"] == results["1f1b"]["ratio_theory"] == 1
    assert results["interleaved"]["ratio"] is None  # other microbatches
    assert results["interleaved"]["utilization"] == pytest.approx(1.2 / 1.75)
    assert (next_multiple(4, 8), next_multiple(8, 8), next_multiple(9, 8)) == (8, 8, 16)


def test_results_of_real_training():
    runs = {name: real(name) for name in ("1f1b", "paci")}
    measured = {
        "1f1b": [repetition(0.35, 2, step=0.2), repetition(0.33, 2, step=0.2)],
        # Passes were slower here, as both cores were busy.
        "paci": [repetition(0.2, 2, forward=0.06), repetition(0.2, 2, forward=0.06, step=0.02)],
    }
    results = results_of(runs, measured)
    base, paci = results["1f1b"], results["paci"]
    assert base["costs"][0] == {"forward": 0.05, "backward": 0.1, "step": 0.01}  # that of PACI
    assert paci["tokens_per_second"] == pytest.approx(256 / 0.2)
    assert paci["ratio"] == pytest.approx(1.7)
    assert paci["ratio_theory"] == pytest.approx(2)
    # An iteration of 1F1B is a pass through two stages and a step.
    assert base["predicted_seconds"] == pytest.approx(0.31)
    assert paci["ratio_predicted"] == pytest.approx(0.31 / 0.17)
    assert paci["ratio_predicted_1f1b"] == pytest.approx(0.31 / 0.16)
    assert paci["of_predicted"] == pytest.approx(1.7 / (0.31 / 0.17))
    assert base["ratio"] == base["ratio_predicted"] == base["of_predicted"] == 1
    assert "ratio" not in results_of({"paci": runs["paci"]}, {"paci": measured["paci"]})["paci"]


REFUSED = {
    "emulated": {
        "--stages x": "not a whole number",
        "--microbatches 0": "1 or more",
        "--schedules 1f1b,gpipe": "'gpipe' is unknown",
        "--accum 3": "does not divide",
        "--schedules 1f1b --accum 2": "without paci",
        "--chunks 1": "2 or more",
        "--forward-ms 0": "more than 0",
        "--backward-ms 1,2,3": "one each",
        "--step-ms -1": "0 or more",
        "--stage-factors 1,2,3": "one each",
        "--slow-stage 2:1.5": "from 0 to 1",
        "--slow-stage 1": "such as 1:1.5",
        "--extra-in-flight -1": "0 or more",
        "--iterations 0": "1 or more",
        "--warmup -1": "0 or more",
        "--repetitions 0": "1 or more",
        "--timeout 0": "more than 0",
        "--stages 1": "more than one stage",
        "--json /no/such/folder/x.json": "create it",
    },
    "real": {
        "--layers 6": "a multiple of 4",
        "--heads 3": "give a divisor",
        "--microbatches 1,,2": "whole numbers",
        "--schedules interleaved --microbatches 1": "a multiple of 2",
        "--hidden 0": "1 or more",
        "--json /": "is a folder",
    },
    "scale": {
        "--stages 2,0": "of 1 or more",
        "--extra-in-flight 0,x": "not a whole number",
        "--forward-ms 1,2,3": "one each",
        "--schedules interleaved --microbatches 2": "a multiple of 4",
    },
    "virtual": {
        "--latency 0,x": "not a number",
        "--stages 2,x": "whole numbers",
        "--extra-in-flight -1": "0 or more",
        "--schedules 1f1b --extra-in-flight 1": "take --schedule paci",
    },
}


@pytest.mark.parametrize(
    ("name", "flags"), [(name, flags) for name, table in REFUSED.items() for flags in table]
)
def test_bad_input_is_refused_before_anything_starts(name, flags, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        COMMANDS[name], "measure_runs", lambda *args, **kwargs: pytest.fail("started")
    )
    line = f"bench {name} {BENCHMARKS[name]} --json {tmp_path / 'x.json'} {flags}"
    assert main(line.split()) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("megatron_paci: error: --") and REFUSED[name][flags] in errors
    assert flags.split()[-2] in errors or "--schedule" in flags
    assert not list(tmp_path.iterdir())


def test_every_mistake_is_listed_at_once(capsys):
    assert main("bench emulated --stages 2 --microbatches x --iterations 0 --json /".split()) == 2
    assert capsys.readouterr().err.count("megatron_paci: error: --") == 3


@pytest.mark.parametrize("name", COMMANDS)
def test_a_failed_rank_and_an_interrupt_end_the_command(name, tmp_path, capsys, monkeypatch):
    for error, status in ((RankError("the end of a log"), 1), (KeyboardInterrupt(), 130)):
        def fail(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(COMMANDS[name], "measure_runs", fail)
        path = tmp_path / "x.json"
        assert main(f"bench {name} {BENCHMARKS[name]} --json {path}".split()) == status
        assert str(error) in capsys.readouterr().err and not path.exists()


def run_command(line: str, monkeypatch, capsys, tmp_path, seconds: dict) -> tuple[dict, str]:
    """Run a benchmark whose trainings take ``seconds`` per iteration, by schedule."""
    asked = []

    def measured(runs, *, seconds: float, repetitions: int = 0):
        asked.extend(runs)
        if not repetitions:  # in virtual time
            return [{"utilization": [0.5, 1], "cross_stage_collectives": 8} for run in runs]
        return [
            [repetition(by_schedule[run.schedule], run.stages)] * repetitions for run in runs
        ]

    by_schedule = seconds
    for command in COMMANDS.values():
        monkeypatch.setattr(command, "measure_runs", measured)
    path = tmp_path / "result.json"
    words = shlex.split(line)
    assert main([*words, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["command"][-1] == str(path) and record["benchmark"] == words[1]
    assert {"date", "versions"} <= record.keys()
    return record | {"asked": asked}, capsys.readouterr().out


def test_emulated_says_what_megatron_cannot_run(monkeypatch, capsys, tmp_path):
    record, text = run_command(
        "bench emulated --stages 8 --microbatches 4 --forward-ms 50 --repetitions 2",
        monkeypatch, capsys, tmp_path, {"1f1b": 1.65, "interleaved": 1.75, "paci": 0.625},
    )
    schedules = record["schedules"]
    assert list(schedules) == ["1f1b", "interleaved", "paci"]
    assert schedules["paci"]["utilization"] == pytest.approx(0.96)
    assert schedules["paci"]["throughput"] == pytest.approx(6.4)
    other = schedules["interleaved"]
    assert other["utilization"] is None and "a multiple of 8" in other["reason"]
    assert other["theory"] == pytest.approx(8 / 15)
    assert other["instead"]["microbatches"] == 8
    assert other["instead"]["theory"] == pytest.approx(16 / 23)
    assert [run.microbatches for run in record["asked"]] == [4, 8, 4]
    assert "0.9600" in text and "a multiple of 8" in text and "2.640" in text
    assert "2.0 ms waiting for an input" in text and "give them more time" in text


def test_emulated_slows_stages(monkeypatch, capsys, tmp_path):
    record, _ = run_command(
        "bench emulated --stages 2 --microbatches 4 --forward-ms 50,60 --backward-ms 100 "
        "--slow-stage 1:1.5 --stage-factors 2,3 --schedules paci --accum 2",
        monkeypatch, capsys, tmp_path, {"paci": 3.0},
    )
    [run] = record["asked"]
    assert run.forward == pytest.approx((0.1, 0.27)) and run.backward == (0.2, 0.45)
    assert run.accum == 2
    assert record["schedules"]["paci"]["ratio"] is None
    busy = record["schedules"]["paci"]["utilization_by_stage"]
    assert busy == pytest.approx([4 * 0.3 / 3, 4 * 0.72 / 3])


def test_real_measures_what_can_run(monkeypatch, capsys, tmp_path):
    record, text = run_command(
        "bench real --microbatches 1,2", monkeypatch, capsys, tmp_path,
        {"1f1b": 0.3, "interleaved": 0.25, "paci": 0.2},
    )
    assert [(run.microbatches, run.schedule) for run in record["asked"]] == [
        (1, "1f1b"), (1, "paci"), (2, "1f1b"), (2, "interleaved"), (2, "paci"),
    ]
    one = record["microbatches"]["1"]
    assert one["paci"]["ratio"] == pytest.approx(1.5)
    assert one["interleaved"]["tokens_per_second"] is None
    reason = one["interleaved"]["reason"]
    assert "a multiple of 2" in reason and reason in text
    assert record["microbatches"]["2"]["interleaved"]["ratio"] == pytest.approx(1.2)


def test_scale_measures_each_size(monkeypatch, capsys, tmp_path):
    record, text = run_command(
        "bench scale --stages 2,4 --microbatches 4 --extra-in-flight 0,1 --forward-ms 50",
        monkeypatch, capsys, tmp_path, {"1f1b": 1.65, "paci": 0.64},
    )
    rows = [(row["stages"], row["schedule"], row["extra_in_flight"]) for row in record["rows"]]
    assert rows == [(n, *rest) for n in (2, 4) for rest in (("1f1b", 0), ("paci", 0), ("paci", 1))]
    assert record["rows"][1]["iteration_ms"] == pytest.approx(640)
    assert record["rows"][1]["overhead_ms"] == pytest.approx(10)
    assert "640.0" in text and "10.00" in text


def test_virtual_simulates_without_processes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(virtual_command, "measure_runs", None)
    path = tmp_path / "x.json"
    line = ("bench virtual --stages 2,8 --microbatches 4 --schedules 1f1b,interleaved,paci "
            f"--latencies 0,1/2 --simulate --json {path}")
    assert main(line.split()) == 0
    runs = json.loads(path.read_text())["runs"]
    found = {
        (run["parameters"]["schedule"], run["parameters"]["stages"], run["parameters"]["latency"]):
        min(run["utilization"]) for run in runs if "utilization" in run
    }
    assert found["1f1b", 8, "0"] == 4 / 11 and found["interleaved", 2, "0"] == 8 / 9
    assert found["paci", 8, "0"] == 1 and found["paci", 2, "1/2"] == 6 / 7
    assert len(found) == 10 and all("refused" in run or run["simulated"] for run in runs)
    assert capsys.readouterr().out.startswith("simulated, ")


def test_virtual_makes_a_table_of_a_grid(monkeypatch, capsys, tmp_path):
    record, text = run_command(
        "bench virtual --stages 2,4 --microbatches 2 --schedules 1f1b,interleaved,paci "
        "--latencies 0,0.1 --accum 2", monkeypatch, capsys, tmp_path, {},
    )
    runs = record["runs"]
    assert len(runs) == 12
    refused = [run["parameters"] for run in runs if "refused" in run]
    assert [(each["stages"], each["schedule"]) for each in refused] == [(4, "interleaved")] * 2
    assert {run["parameters"]["accum"] for run in runs if "utilization" in run} == {None, 2}
    assert text.count("0.5000") == 10 and "give a multiple of 4" in text


@pytest.fixture(scope="module")
def performance():
    """docs/performance.py as a module."""
    sys.path.insert(0, str(DOCS))
    try:
        import performance
    finally:
        sys.path.remove(str(DOCS))
    return performance


ROWS = {"real": 11, "emulated": 5, "loop": 25, "parallel": 3, "latency": 20, "scale": 7}


@pytest.mark.parametrize("name", ROWS)
def test_the_tables_of_the_page_can_be_made(name, performance, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(virtual_command, "simulate", lambda run: {"utilization": [1.0, 0.75]})
    times = {"1f1b": 1.65, "interleaved": 1.75, "paci": 0.625}
    table = performance.TABLES[name]
    results = {
        each: run_command(f"bench {flags}", monkeypatch, capsys, tmp_path, times)[0]
        for each, flags in table.benchmarks.items()
    }
    head, line, *rows = table.text(results).splitlines()
    assert len(rows) == ROWS[name] and {row.count("|") for row in rows} == {head.count("|")}


def test_every_table_has_its_place_on_the_page(performance):
    text = (DOCS / "performance.md").read_text()
    places = [found[2] for found in performance.BLOCK.finditer(text)]
    assert sorted(places) == sorted(performance.TABLES) == sorted(ROWS)
