"""examples/demo.py: the comparison of the demo, without training."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from megatron_paci.compare.launch import RunError
from tests.unit.compared import write_records, write_traces

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("paci_demo", ROOT / "examples" / "demo.py")
demo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo)


def test_flags_name_the_corpus_and_no_schedule():
    flags = demo.training_flags(iterations=40, corpus=Path("/elsewhere/corpus"))
    assert flags[flags.index("--train-iters") + 1] == "40"
    assert flags[flags.index("--train-data-path") + 1] == "/elsewhere/corpus/train_text_document"
    assert not any("paci" in flag or "schedule" in flag for flag in flags)


def test_a_corpus_counts_as_there_only_with_all_its_files(tmp_path):
    assert demo.read_manifest(tmp_path) is None
    manifest = {"sha256": {"tokenizer.model": "0"}}
    (tmp_path / "corpus.json").write_text(json.dumps(manifest))
    assert demo.read_manifest(tmp_path) is None
    (tmp_path / "tokenizer.model").touch()
    assert demo.read_manifest(tmp_path) == manifest
    (tmp_path / "corpus.json").write_text("{")
    assert demo.read_manifest(tmp_path) is None


@pytest.mark.parametrize("flags, reason", [
    (["--iterations", "many"], "invalid int"),
    (["--iterations", "5"], "at least 20"),
    (["--output", str(ROOT / "Makefile")], "cannot write there"),
])
def test_bad_flags_are_refused_with_the_reason(flags, reason, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.parse_arguments(flags)
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.fixture
def run_fake(tmp_path, monkeypatch, capsys):
    """Run the demo with something in the place of training; return (status, stdout, stderr)."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "corpus.json").write_text(json.dumps({
        "parameters": {"input": [], "vocab_size": 64}, "splits": {"train": {"tokens": 30}},
        "sha256": {}}))
    monkeypatch.chdir(tmp_path)  # and back at the end: the demo goes where its project is

    def run_fake(train):
        monkeypatch.setattr("megatron_paci.compare.runs.train", train)
        args = demo.parse_arguments(
            ["--output", str(tmp_path / "out"), "--corpus", str(corpus), "--iterations", "20"])
        return demo.demo(args), *capsys.readouterr()

    return run_fake


def train(command, **_):
    """Leave what a training leaves."""
    schedule = command[command.index("--pipeline-schedule") + 1]
    write_records(Path(command[command.index("--paci-record") + 1]), schedule)
    write_traces(Path(command[command.index("--paci-trace") + 1]), schedule)


def test_both_runs_are_reported(run_fake, tmp_path):
    commands = []

    def remembered(command, **_):
        commands.append(command)
        train(command)

    status, out, err = run_fake(remembered)
    assert status == 0 and "PACI / 1F1B" in out, err
    header = next(line for line in out.splitlines() if line.split() == ["1F1B", "PACI"])
    assert len(header) == 82
    assert [line.split()[0] for line in out.splitlines()[-2:]] == ["report:", "plot:"]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(report["runs"]) == ["1f1b", "paci"]
    assert (tmp_path / "out" / "loss.png").exists()
    assert commands[0][:3] == [sys.executable, "-m", "torch.distributed.run"]
    place = commands[1].index("--pipeline-schedule")
    assert commands[1][place:place + 4] == ["--pipeline-schedule", "paci", "--paci-accum", "4"]
    assert commands[0][:place + 2] == [*commands[1][:place + 1], "1f1b"]


def test_what_was_made_before_a_failure_is_kept_and_nothing_older(run_fake, tmp_path):
    for stale in ("loss.png", "runs/paci/record/rank0.json"):
        path = tmp_path / "out" / stale
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def failing(command, **_):
        if "paci" in command[command.index("--pipeline-schedule") + 1]:
            raise RunError("PACI failed with exit status 1: the reason")
        train(command)

    status, out, err = run_fake(failing)
    assert status == 1
    assert "PACI failed with exit status 1" in err and "the reason" in err
    runs = json.loads((tmp_path / "out" / "report.json").read_text())["runs"]
    assert [run["state"] for run in runs.values()] == ["done", "failed"]
    assert not (tmp_path / "out" / "runs" / "paci" / "record").exists()
    assert "throughput" in out and "not measured" in out
