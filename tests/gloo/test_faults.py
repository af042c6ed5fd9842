"""What becomes of a job that meets a fault: a part of docs/reliability.md, which has them all.

Most are forked from processes that have imported Megatron, without a launcher that would end the
other ranks, so these have to notice by themselves. One is started with torchrun.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_paci.bench.ranks import run_ranks
from tests.gloo.fault_run import SCRIPT, Observed, last_saved, unsaid
from tests.gloo.faults import FAULTS, Ending, Fault, command_line

PROGRAM = str(Path(__file__).with_name("endings.py"))
FACTOR = float(os.environ.get("TEST_TIME_FACTOR", "1"))
# python docs/reliability.py tries all of FAULTS.
RESUMED = ("kill-in-drain", "kill-in-save")
ENDED = (
    *RESUMED, "kill-in-evaluation", "kill-middle", "kill-in-warm-up", "data-ends-first", "leave",
    "term-loaders", "disk-full", "error-middle",
)
WENT_ON = ("slow", "stall")
SAVED = ("term-saves", "int-saves")
SAVED_AT, TRAINED = 5, 8  # iterations
UNDISTURBED = {
    stages: Fault(words="no fault", happens="", stages=stages, ending=Ending.GOES_ON)
    for stages in (2, 4)
}


def run_of(fault: Fault, folder: Path, plan: dict) -> dict:
    """Return a run of endings.py."""
    return {
        "script": SCRIPT,
        "size": fault.stages,
        "arguments": command_line(fault, folder),
        "environment": {"FAULT": json.dumps({"folder": str(folder), **plan})},
    }


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Name to the results of its ranks, and the folder that holds a job's folder by name.

    ``<name>`` is the job with the fault, ``again-<name>`` the one that is started after it.
    """
    folder = tmp_path_factory.mktemp("faults")
    runs = {}
    for stages, fault in UNDISTURBED.items():
        runs[f"undisturbed-{stages}"] = run_of(fault, folder / f"undisturbed-{stages}", {})
    for name in (*ENDED, *WENT_ON, *SAVED):
        fault, own = FAULTS[name], folder / name
        own.mkdir()
        if fault.prepare:
            fault.prepare(own)
        runs[name] = run_of(fault, own, fault.plan)
        if name in (*RESUMED, SAVED[0]):
            runs[f"again-{name}"] = run_of(fault, own, {})
    # What those that save at a signal have to be like: ended there by a flag.
    drained = UNDISTURBED[2]
    for name, extra in (("drained", f"--exit-interval {SAVED_AT}"), ("again-drained", "")):
        runs[name] = run_of(replace(drained, extra=extra), folder / "drained", {})
    for run in runs.values():
        Path(json.loads(run["environment"]["FAULT"])["folder"]).mkdir(exist_ok=True)
    results = run_ranks(1, list(runs.values()), folder, seconds=250 * FACTOR, program=[PROGRAM])
    return {name: ranks for name, [ranks] in zip(runs, results)}, folder


@pytest.fixture(scope="module")
def finals(jobs):
    """Name of a job's folder to the states in which its ranks have ended."""
    return {
        each.name: [
            json.loads(file.read_text()) for file in sorted(each.glob("final.*.json"))
        ]
        for each in jobs[1].iterdir() if each.is_dir()
    }


@pytest.mark.parametrize("name", ENDED)
def test_all_ranks_end_and_say_what_they_were_doing(jobs, name):
    fault, ranks = FAULTS[name], jobs[0][name][: FAULTS[name].stages]
    for rank, each in enumerate(ranks):
        assert (each["status"] == 0) == (name == "leave" and rank == 1), each["output"]
    assert not unsaid(fault, [each["output"] for each in ranks])


def test_an_exception_is_told_before_its_traceback_is_printed(jobs):
    """A launcher may end the process in between."""
    for each in jobs[0]["error-middle"]:
        assert 0 < each["output"].find("ERROR:megatron_paci") < each["output"].find("Traceback")


@pytest.mark.parametrize("name", RESUMED)
def test_a_job_that_is_started_again_ends_as_if_nothing_had_happened(jobs, finals, name):
    stages = FAULTS[name].stages
    for each in jobs[0][f"again-{name}"][:stages]:
        assert each["status"] == 0, each["output"]
    assert len(finals[name]) == stages and finals[name] == finals[f"undisturbed-{stages}"]


@pytest.mark.parametrize("name", ["disk-full"])
def test_a_save_that_fails_leaves_the_one_before(jobs, name):
    assert last_saved(jobs[1] / name) == 2


@pytest.mark.parametrize("name", WENT_ON)
def test_a_slow_stage_changes_nothing(jobs, finals, name):
    ranks = jobs[0][name][:2]
    assert [each["status"] for each in ranks] == [0, 0], ranks
    assert not unsaid(FAULTS[name], [each["output"] for each in ranks])
    assert len(finals[name]) == 2 and finals[name] == finals["undisturbed-2"]


@pytest.mark.parametrize("name", SAVED)
def test_a_signal_to_one_rank_lets_all_save_and_end_with_status_0(jobs, name):
    first, last = jobs[0][name][:2]
    assert (first["status"], last["status"]) == (0, 0), first["output"] + last["output"]
    assert f"iteration        {SAVED_AT}/" in last["output"]
    assert f"iteration        {SAVED_AT + 1}/" not in last["output"]
    goes_on = name == SAVED[0]
    assert last_saved(jobs[1] / name) == (TRAINED if goes_on else SAVED_AT)


def test_after_a_signal_a_job_goes_on_like_one_that_was_to_end_there(jobs, finals):
    for each in (*jobs[0][f"again-{SAVED[0]}"][:2], *jobs[0]["again-drained"][:2]):
        assert each["status"] == 0, each["output"]
    assert len(finals[SAVED[0]]) == 2 and finals[SAVED[0]] == finals["drained"]
    assert finals["drained"] != finals["undisturbed-2"]  # a drain more is another stream


def test_with_torchrun(tmp_path, finals):
    observed = Observed(FAULTS["kill-in-drain-end"], tmp_path / "job", limit=150 * FACTOR)
    observed.check(finals["undisturbed-2"])
    assert observed.seconds < 60  # the distributed time-out
    assert observed.lost <= 2  # iterations between two saves
