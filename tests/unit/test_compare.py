"""megatron_paci/compare: plans, records, tables and logs, without training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_paci.compare.launch import failure, left_for_all, progress
from megatron_paci.compare.plan import Plan, PlanError, make_plan
from megatron_paci.compare.records import (
    RecordError,
    final_evaluation,
    read_records,
    run_figures,
    to_json,
    tokens_per_second,
)
from megatron_paci.compare.table import comparison_table, speedup, speedup_text
from tests.unit.compared import ENDS, LOSSES, figures, record

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "examples/pretrain_gpt.py"


# Plans


def plan_of(arguments="--lr 1", **options):
    return make_plan(str(ROOT / SCRIPT), arguments.split(), output=Path("out/x"), num_ranks=2,
                     device="cpu", **options)


def test_runs_differ_in_the_schedule_alone():
    plan = plan_of(accum=[2, 4], chunks=3)
    assert [run.name for run in plan.runs] == ["1f1b", "interleaved", "paci-a2", "paci-a4"]
    assert [run.label for run in plan.runs] == ["1F1B", "Interleaved 1F1B", "PACI, a=2",
                                                "PACI, a=4"]
    assert [run.added for run in plan.runs] == [
        ["--pipeline-schedule", "1f1b"],
        ["--pipeline-schedule", "interleaved", "--num-virtual-stages-per-pipeline-rank", "3"],
        ["--pipeline-schedule", "paci", "--paci-accum", "2"],
        ["--pipeline-schedule", "paci", "--paci-accum", "4"],
    ]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             "-m", "megatron_paci", "run", "--device", "cpu", str(ROOT / SCRIPT), "--lr", "1"]
    for run in plan.runs:
        kept = ["--paci-record", f"out/x/runs/{run.name}/record",
                "--paci-trace", f"out/x/runs/{run.name}/trace"]
        assert run.command == [*start, *run.added, *kept]


def test_runs_keep_out_of_each_others_folders():
    for run in plan_of("--save a --tensorboard-dir=b").runs:
        assert run.added[-4:] == ["--save", f"{run.folder}/save",
                                  "--tensorboard-dir", f"{run.folder}/tensorboard-dir"]


def test_flags_for_one_schedule_and_another_launcher():
    plan = plan_of(schedules=["paci", "1f1b"], only_for={"paci": ["--lr", "2"]}, trace=False,
                   launcher=["srun", "python"])
    assert plan.runs[0].added == ["--pipeline-schedule", "paci", "--lr", "2"]
    assert plan.runs[1].added == ["--pipeline-schedule", "1f1b"]
    assert plan.runs[1].command[:5] == ["srun", "python", "-m", "megatron_paci", "run"]
    assert "--paci-trace" not in plan.runs[1].command


def test_a_plan_is_kept_and_what_is_none_is_told(tmp_path):
    plan = plan_of()
    plan.write(tmp_path / "plan.json")
    found = Plan.read(tmp_path / "plan.json")
    # A folder that was copied is read where it lies.
    assert [run.folder for run in found.runs] == [
        str(tmp_path / "runs" / run.name) for run in plan.runs]
    assert [run.command for run in found.runs] == [run.command for run in plan.runs]
    assert (found.script, found.num_ranks, found.device) == (plan.script, 2, "cpu")
    for text in ("{", "[]", '{"runs": [{}]}'):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(PlanError, match="is no plan"):
            Plan.read(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="is no plan"):
        Plan.read(tmp_path / "none.json")


def test_a_senseless_plan_is_refused_with_every_reason():
    with pytest.raises(PlanError) as caught:
        make_plan("nowhere.py", ["--paci-accum=4", "--paci-record", "x"], output=Path("o"),
                  num_ranks=2, device="cpu", schedules=["1f1b", "gpipe"],
                  only_for={"paci": ["--lr", "1"]})
    text = str(caught.value)
    for reason in ("--schedules gpipe", "--paci-accum", "--paci-record", "nowhere.py",
                   "--only-for paci"):
        assert reason in text
    assert len(text.splitlines()) == 5


# Records


def test_figures_of_a_run():
    run = figures()
    assert (run["loss"], run["seconds"]) == (list(LOSSES), list(ENDS))
    assert run["samples"] == [8, 16, 24, 32, 40]
    assert (run["final_loss"], run["valid_loss"], run["test_loss"]) == (6.0, 4.5, 4.6)
    assert (run["drift_max"], run["drift_bound"], run["in_flight_max"]) == ([1, 0], [1, 0], [2, 1])
    assert [stage["activations_peak"] for stage in run["bytes"]] == [3_000_000, 1_500_000]
    assert "drift_max" not in figures("1f1b")


def test_a_stage_of_several_ranks_counts_once_with_the_fullest():
    """Two replicas; as in Megatron the pipelines are ranks (0, 2) and (1, 3)."""
    records = [record(rank // 2, rank=rank, data_parallel=2, scale=1 + rank % 2)
               for rank in range(4)]
    run = run_figures(records)
    assert run["loss"] == list(LOSSES)
    assert [stage["activations_peak"] for stage in run["bytes"]] == [6_000_000, 3_000_000]
    assert run["drift_max"] == [1, 0]


def test_throughput_leaves_the_counted_iterations_out_and_waits_for_the_slowest_rank():
    records = [record(0), record(1, ends=(9.0, 9.5, 10.0, 11.0, 12.0))]
    assert tokens_per_second(records) == 2 * 800 / 2.0


def test_no_throughput_without_iterations_to_time():
    short = [record(stage, losses=(8.0, 7.0), ends=(1.0, 2.0)) for stage in range(2)]
    assert tokens_per_second(short) is None
    assert "-" in comparison_table({"paci": figures(losses=(8.0,), ends=(1.0,))})


def test_no_validation_loss_without_evaluation():
    assert final_evaluation({"evaluations": []}, "validation") is None


def test_a_record_without_losses_is_refused():
    with pytest.raises(RecordError, match="lm loss"):
        run_figures([record(0), record(1, losses=())])


def test_records_are_read_in_the_order_of_the_ranks(tmp_path):
    for rank in range(12):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(
            record(rank % 2, rank=rank, data_parallel=3, tensor_parallel=2)))
    assert [entry["run"]["rank"] for entry in read_records(tmp_path)] == list(range(12))


@pytest.mark.parametrize("files, reason", [
    ({}, "no rank"),
    ({"rank1.json": record(1)}, "rank 0"),
    ({"rank0.json": record(0)}, "rank 1"),
    ({"rank0.json": {"losses": []}}, "another version"),
    ({"rank0.json": "{"}, "cannot be read"),
])
def test_incomplete_records_are_refused(tmp_path, files, reason):
    for name, found in files.items():
        (tmp_path / name).write_text(found if isinstance(found, str) else json.dumps(found))
    with pytest.raises(RecordError, match=reason):
        read_records(tmp_path)


# Tables


@pytest.fixture
def runs():
    return {"1f1b": figures("1f1b", "1F1B"),
            "paci": figures(label="PACI", ends=(1.0, 2.0, 3.0, 3.4, 3.8))}


def test_speedup_is_measured_and_set_beside_theory(runs):
    assert speedup(runs) == {"measured": pytest.approx(1.25), "theory": 1.25}
    text = speedup_text(runs, cores=2)
    assert "1.25 measured, 1.25 at most in theory" in text and "Measure again" not in text
    assert "not measured" in speedup_text({"1f1b": runs["1f1b"]}, cores=2)
    fast = runs | {"paci": figures(ends=(1.0, 2.0, 3.0, 3.2, 3.5))}
    assert "Measure again" in speedup_text(fast, cores=2)
    assert "share 1 core:" in speedup_text(runs, cores=1)


def test_table_is_aligned_and_fits_a_screen(runs):
    header, rule, *rows = comparison_table(runs).splitlines()
    assert header.split() == ["1F1B", "PACI"]
    assert {len(line) for line in (header, rule, *rows)} == {len(header)}
    assert len(header) <= 100
    cells = {row[:-24].strip(): row[-24:].split() for row in rows}
    assert cells["throughput (tokens/s)"] == ["1,600", "2,000"]
    assert cells["drift reached / bound (optimizer steps), stage 0"] == ["-", "1", "/", "1"]
    assert cells["activations kept for backward, peak (MB), stage 0"] == ["3.0", "3.0"]
    assert not any("GPU" in title for title in cells)


def test_report_is_strict_json_with_one_line_per_list():
    text = to_json({"a": [1.0, float("nan"), float("inf")], "b": {"c": [2, 1]}})
    assert '"a": [ 1.0, null, null ]' in text
    assert json.loads(text)["b"]["c"] == [2, 1]


# Logs


def test_progress_is_read_from_the_lines_of_iterations():
    line = (" [2026-01-01 00:00:00] iteration       19/     300 | consumed samples:          152 | "
            "learning rate: 1.0E-04 | lm loss: 6.423179E+00 | loss scale: 1.0 |")
    assert progress(line) == (19, 300, 6.423179)
    assert progress(" validation loss at iteration 20 | lm loss value: 6.4E+00") is None


def test_the_time_left_is_that_of_all_runs_with_their_start_up():
    # Started at 100, first heard of at 120 (start-up), 10 iterations in 5 s since: 40 s are left.
    assert left_for_all(100, (120, 10), (125, 20), 100, runs_after=0) == 40
    assert left_for_all(100, (120, 10), (125, 20), 100, runs_after=2) == 40 + 2 * (25 + 40)
    assert left_for_all(100, (120, 10), (120, 10), 100, runs_after=0) == 180
    assert left_for_all(100, (120, 10), (165, 100), 100, runs_after=0) == 0


def test_failure_shows_the_reason_and_not_the_launchers_remarks():
    launcher = ("E0101 00:00:00.0 1 torch/distributed/elastic/multiprocessing/api.py:1010] failed "
                "(exitcode: 1)\nTraceback (most recent call last):\nChildFailedError\n")
    log = "a.py:1: UserWarning: x\n  warnings.warn(\n\nTraceback ...\nValueError: bad\n" + launcher
    assert failure(log) == "Traceback ...\nValueError: bad"
    refused = "noise\nmegatron_paci: error: cannot run:\n- why. Remedy: what.\n" + launcher
    assert failure(refused) == "megatron_paci: error: cannot run:\n- why. Remedy: what."
    assert failure("") == "(the log is empty)"


def test_nothing_of_a_report_needs_torch():
    code = ("import sys, megatron_paci.compare.command, matplotlib.figure; "
            "sys.exit('torch' in sys.modules or 'megatron' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
