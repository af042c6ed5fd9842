"""``compare`` from end to end: two schedules of a tiny GPT, in one report."""

from __future__ import annotations

import json

import pytest

from megatron_paci.__main__ import main
from megatron_paci.compare.records import read_records
from tests.gloo.launch import flags
from tests.gloo.torchrun import ROOT

ITERATIONS, MICROBATCHES = 7, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def report(folder):
    """The second command goes on with what the first one has done."""
    common = ["compare", "--nproc", "2", "--device", "cpu", "--output", str(folder), "--accum", "4"]
    training = [str(ROOT / "examples/pretrain_gpt.py"),
                *flags(2, f"--train-iters {ITERATIONS} --save-interval 100 "
                          f"--save {folder / 'nowhere'}")]
    with pytest.MonkeyPatch.context() as patch:
        # One process less that imports Megatron; tests/unit/test_compare_check.py has its rules.
        patch.setattr("megatron_paci.compare.command.problems", lambda plan: {})
        assert main([*common, "--no-virtual", "--schedules", "1f1b,paci", *training]) == 0
        records = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/record/*")}
        assert len(records) == 4
        whole = json.loads((folder / "report.json").read_text())
        assert main([*common, "--schedules", "paci", *training]) == 0
        assert {path: path.stat().st_mtime_ns for path in records} == records
    return whole, json.loads((folder / "report.json").read_text())


def test_both_schedules_are_measured_with_all_their_parts(report, folder):
    whole, _ = report
    assert list(whole["runs"]) == ["1f1b", "paci-a4"]
    for run in whole["runs"].values():
        assert run["state"] == "done" and len(run["loss"]) == ITERATIONS
        assert run["samples"] == [16 * (i + 1) for i in range(ITERATIONS)]
        assert (run["num_stages"], run["num_microbatches"]) == (2, MICROBATCHES)
        assert run["tokens_per_s"] > 0 and run["predicted_seconds"] > 0
        assert len(run["trace"]["utilization"]) == 2 and not run["trace"]["truncated"]
        assert all(cost[key] > 0 for cost in run["trace"]["costs"]
                   for key in ("forward", "backward", "step"))
        # Both sets are evaluated, and told apart.
        assert None not in (run["valid_loss"], run["test_loss"])
        assert run["valid_loss"] != run["test_loss"]
    first, other = whole["runs"].values()
    assert first["loss"][0] == other["loss"][0] != other["loss"][-1]  # the same seed and data
    assert first["valid_loss"] != other["valid_loss"]  # it did run PACI
    assert other["drift_max"] == [1, 0] and "drift_max" not in first
    assert not (folder / "nowhere").exists()  # each run has its own
    assert (folder / "runs/1f1b/save/latest_checkpointed_iteration.txt").exists()
    for name in ("report.html", "report.md", "loss.png", "throughput.png", "time.png",
                 "timeline.png", "drift.png", "memory.png"):
        assert (folder / name).stat().st_size > 1000


def test_evaluations_name_their_data_set(report, folder):
    last = read_records(folder / "runs/1f1b/record")[1]
    assert [entry["data_set"] for entry in last["evaluations"]] == ["validation", "test"]
    assert all(entry["after_iterations"] == ITERATIONS for entry in last["evaluations"])


def test_virtual_time_is_that_of_the_script_and_of_no_other_run(report):
    _, only = report
    [run] = only["runs"].values()
    assert run["virtual"]["cross_stage_collectives"] == 0
    # In virtual time the slowest stage of PACI never waits.
    slowest = max(
        MICROBATCHES * (cost["forward"] + cost["backward"]) + 2 * cost["step"]
        for cost in run["trace"]["costs"]
    )
    assert max(run["virtual"]["utilization"]) == pytest.approx(1)
    assert run["virtual"]["seconds_per_iteration"] == pytest.approx(slowest, abs=1e-4)
    assert run["predicted_seconds"] == pytest.approx(slowest, rel=1e-3)
