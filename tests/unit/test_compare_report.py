"""megatron_paci/compare: runs are done, kept, continued and reported, with scripts for training."""

from __future__ import annotations

import json
import re
import shlex
import struct
import subprocess
import sys
import textwrap
from html.parser import HTMLParser

import pytest

from megatron_paci.compare import command, launch, virtual
from megatron_paci.compare import report as report_module
from megatron_paci.compare.command import compare
from megatron_paci.compare.plan import make_plan
from megatron_paci.compare.report import collect
from megatron_paci.compare.runs import read_state
from tests.unit.compared import write_runs

PICTURES = ["loss.png", "throughput.png", "time.png", "timeline.png", "drift.png", "memory.png"]
TRAINING = """
    import shutil, sys
    from pathlib import Path
    words = sys.argv
    schedule = words[words.index("--pipeline-schedule") + 1]
    for what in ("record", "trace"):
        target = Path(words[words.index(f"--paci-{what}") + 1])
        shutil.copytree(Path(words[1]) / schedule / what, target)
    with (Path(words[1]) / "started").open("a") as started:
        started.write(schedule + " ")
"""


@pytest.fixture
def pictures():
    """Ask for it to have pictures drawn, which takes seconds."""


@pytest.fixture(autouse=True)
def only_pictures_asked_for(request, monkeypatch):
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(report_module, "_draw", lambda *_: [])


@pytest.fixture
def made(tmp_path):
    """A folder with records and traces of each schedule."""
    write_runs(tmp_path / "made")
    return tmp_path / "made"


@pytest.fixture
def plan_with(tmp_path, made):
    """Return a plan whose runs execute a script in place of training."""

    def plan_with(script=TRAINING, flags=(), **options):
        (tmp_path / "train.py").write_text(textwrap.dedent(script))
        found = make_plan(
            str(tmp_path / "train.py"), list(flags), output=tmp_path / "out", num_ranks=2,
            device="cpu", launcher=["none"], **options)
        for run in found.runs:
            run.command[:run.command.index(found.script)] = [sys.executable]
            run.command.insert(2, str(made))
        return found

    return plan_with


def started(made):
    return (made / "started").read_text().split()


# From runs to a report


def test_a_report_of_three_schedules(plan_with, tmp_path, capsys, pictures):
    plan = plan_with()
    assert compare(plan, tmp_path / "out", title="A <title>") == 0
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        "runs", "report.json", "report.md", "report.html", *PICTURES}
    for name in PICTURES:
        data = (out / name).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">I", data[16:20]) == (1280,)
    report = json.loads((out / "report.json").read_text())
    assert list(report["runs"]) == ["1f1b", "interleaved", "paci"]
    assert {run["state"] for run in report["runs"].values()} == {"done"}
    assert report["costs_from"] == "1F1B"
    said = capsys.readouterr().out
    assert report["verdict"]["headline"] in said and "report.html" in said
    markdown = (out / "report.md").read_text()
    assert report["verdict"]["headline"] in markdown
    for planned, run in zip(plan.runs, report["runs"].values()):
        assert shlex.split(run["command"]) == planned.command
        assert run["command"] in markdown and run["added"] in markdown
    assert "torch 2" in markdown
    check_html((out / "report.html").read_text())


def check_html(text):
    """It is whole and needs no network."""
    assert "<h1>A &lt;title&gt;</h1>" in text
    open_tags, links = [], []

    class Checker(HTMLParser):
        def handle_starttag(self, tag, attrs):
            links.extend(value for name, value in attrs if name in ("src", "href"))
            if tag not in ("meta", "img"):
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Checker().feed(text)
    assert not open_tags
    assert len(links) == len(PICTURES)
    assert all(link.startswith("data:image/png;base64,") for link in links)
    assert not re.search(r"https?://|@import|url\(", text)


def test_a_failed_run_is_told_and_the_others_count(plan_with, tmp_path, made, capsys):
    script = TRAINING + """
    if schedule == "interleaved":
        shutil.rmtree(target.parent / "record")
        sys.exit("the reason")
    """
    assert compare(plan_with(script), tmp_path / "out", title="T") == 1
    assert "the reason" in capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [run["state"] for run in report["runs"].values()] == ["done", "failed", "done"]
    assert "exit status 1" in report["runs"]["interleaved"]["error"]
    assert "1.25 measured" in report["verdict"]["facts"][0]
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "## Failed: Interleaved 1F1B" in markdown and "the reason" in markdown
    assert started(made) == ["1f1b", "interleaved", "paci"]


def test_a_run_without_a_record_has_failed(plan_with, tmp_path):
    plan = plan_with("pass", schedules=["1f1b"])
    assert compare(plan, tmp_path / "out", title="T") == 1
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert "holds no rank*.json" in report["runs"]["1f1b"]["error"]
    assert (tmp_path / "out" / "report.html").exists()


def test_what_is_missing_is_done_and_a_changed_command_is_a_new_run(plan_with, tmp_path, made):
    out = tmp_path / "out"
    lacking = "if schedule == 'paci' and not Path(words[1], 'go').exists():\n        sys.exit(1)\n"
    failing = TRAINING.replace("    with (", f"    {lacking}    with (")
    assert compare(plan_with(failing), out, title="T") == 1
    assert started(made) == ["1f1b", "interleaved"]
    (made / "go").touch()
    assert compare(plan_with(failing), out, title="T") == 0
    assert started(made) == ["1f1b", "interleaved", "paci"]
    assert compare(plan_with(failing), out, title="T") == 0
    assert started(made) == ["1f1b", "interleaved", "paci"]
    # Other flags, or another text of the script: nothing older counts.
    stale = out / "runs" / "1f1b" / "stale"
    stale.touch()
    assert compare(plan_with(failing, ["--lr", "2"]), out, title="T") == 0
    assert started(made)[3:] == ["1f1b", "interleaved", "paci"] and not stale.exists()
    assert compare(plan_with(failing + "\n    # new", ["--lr", "2"]), out, title="T") == 0
    assert len(started(made)) == 9
    assert compare(plan_with(failing + "\n    # new", ["--lr", "2"]), out, title="T",
                   again=True) == 0
    assert len(started(made)) == 12


def test_a_run_whose_record_is_damaged_is_done_again(plan_with, tmp_path, made):
    compare(plan_with(), tmp_path / "out", title="T")
    (tmp_path / "out/runs/paci/record/rank1.json").write_text("{")
    compare(plan_with(), tmp_path / "out", title="T")
    assert started(made) == ["1f1b", "interleaved", "paci", "paci"]


def test_an_interrupt_keeps_what_was_made(plan_with, tmp_path, monkeypatch):
    train, calls = launch.train, []

    def interrupted(*args, **kwargs):
        calls.append(kwargs["label"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        train(*args, **kwargs)

    monkeypatch.setattr("megatron_paci.compare.runs.train", interrupted)
    plan = plan_with()
    assert compare(plan, tmp_path / "out", title="T") == command.INTERRUPTED
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [run["state"] for run in report["runs"].values()] == ["done", "failed", "failed"]
    assert "interrupted" in report["runs"]["interleaved"]["error"]
    assert read_state(plan.runs[2]) == {}


def test_a_run_that_says_nothing_is_stopped(plan_with, tmp_path, monkeypatch):
    processes = []
    popen = subprocess.Popen

    def remember(*args, **kwargs):
        processes.append(popen(*args, **kwargs))
        return processes[-1]

    monkeypatch.setattr(launch.subprocess, "Popen", remember)
    plan = plan_with("import time; time.sleep(60)", schedules=["paci"])
    assert compare(plan, tmp_path / "out", title="T", stall_seconds=0.5) == 1
    assert processes[0].poll() is not None
    assert "wrote nothing" in read_state(plan.runs[0])["error"]


# Traces


def test_a_truncated_trace_counts_as_far_as_it_goes(plan_with, tmp_path, made):
    path = made / "paci" / "trace" / "rank1.jsonl"
    path.write_text(path.read_text()[:-10])
    assert compare(plan_with(), tmp_path / "out", title="T") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["runs"]["paci"]["trace"]["truncated"] == [1]
    assert "trace of rank 1 ends within a line" in (tmp_path / "out" / "report.md").read_text()


def test_a_damaged_trace_leaves_its_parts_out_alone(plan_with, tmp_path, made, pictures):
    path = made / "paci" / "trace" / "rank0.jsonl"
    path.write_text("nonsense\n" + path.read_text())
    assert compare(plan_with(), tmp_path / "out", title="T") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["runs"]["paci"]["state"] == "done"
    assert "is no trace" in report["runs"]["paci"]["trace"]["error"]
    assert "PACI has no time line" in (tmp_path / "out" / "report.md").read_text()
    assert "1.25 measured" in report["verdict"]["facts"][0]


# Virtual time


def test_virtual_time_runs_the_script_itself_and_a_failure_is_a_remark(
    plan_with, tmp_path, monkeypatch
):
    asked = []

    def run_ranks(num_ranks, runs, folder, *, seconds):
        asked.append((num_ranks, runs[0]))
        raise virtual.RankError("a rank failed\nand more")

    monkeypatch.setattr(virtual, "run_ranks", run_ranks)
    monkeypatch.setattr(virtual, "LAST_ITERATIONS", 1)
    plan = plan_with(flags=["--save", "x"], schedules=["1f1b"])
    assert compare(plan, tmp_path / "out", title="T", virtual=True) == 0
    [(ranks, run)] = asked
    assert ranks == 2 and run["script"] == plan.script
    assert run["result"] == {"warmup": 3, "iterations": 1}
    assert run["costs"] == {"forward": "1.000000,1.000000", "backward": "2.000000,2.000000",
                            "step": "0.500000,0.500000"}
    folder = tmp_path / "out/runs/1f1b/virtual"
    assert run["arguments"][-4:] == ["--save", f"{folder}/save", "--exit-interval", "5"]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "1F1B was not measured in virtual time: a rank failed\n" in text


def test_virtual_time_is_kept(plan_with, tmp_path, monkeypatch):
    plan = plan_with(schedules=["1f1b"])
    compare(plan, tmp_path / "out", title="T")
    ranks = [{"stage": stage, "utilization": 0.8, "schedule_utilization": 1, "elapsed": 31.0,
              "compute": 25.0, "idle": {}, "schedule": {}, "cross_stage_collectives": 7,
              "call_sites": []} for stage in range(2)]
    monkeypatch.setattr(virtual, "LAST_ITERATIONS", 0)
    monkeypatch.setattr(virtual, "run_ranks", lambda *_, **__: [ranks])
    first = collect(plan, virtual=True)["runs"]["1f1b"]["virtual"]
    assert first["seconds_per_iteration"] == 15.5 and first["utilization"] == [0.8, 0.8]
    monkeypatch.setattr(virtual, "run_ranks", None)
    assert collect(plan, virtual=True)["runs"]["1f1b"]["virtual"] == first
