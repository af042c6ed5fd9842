"""``python -m megatron_paci compare``: its command line, and its documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_paci.__main__ import main
from megatron_paci.compare import command, report
from megatron_paci.compare.document import Heading, Paragraph, Table, to_html, to_markdown
from tests.unit.compared import write_runs

ROOT = Path(__file__).resolve().parents[2]


def run_command(*words):
    return main(["compare", *words])


def test_commands_can_be_printed_and_the_report_made_later(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "_draw", lambda *_: [])
    out = tmp_path / "out"
    script = str(ROOT / "examples/pretrain_gpt.py")
    assert run_command("--output", str(out), "--nproc", "2", "--schedules", "1f1b,paci",
                       "--launcher", "srun python", "--print-commands", script, "--lr", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line[0] == "#"] == ["# 1F1B", "# PACI"]
    assert all(line.startswith("srun python -m megatron_paci run ") for line in lines[1::2])
    assert not (out / "runs").exists()
    assert run_command("--output", str(out), "--report-only") == 1  # nothing there yet
    write_runs(out / "runs")
    assert run_command("--output", str(out), "--report-only") == 0
    assert "Started by another launcher" in (out / "report.md").read_text()


@pytest.mark.parametrize("words, reason", [
    ([], "SCRIPT is missing"),
    (["--nproc", "two", "x.py"], "--nproc two"),
    (["--accum", "0", "x.py"], "--accum 0"),
    (["--chunks", "1", "x.py"], "--chunks 1"),
    (["--schedules", "1f1b", "--accum", "4", "x.py"], "paci is not among"),
    (["--only-for", 'paci: "', "x.py"], "check the quotes"),
    (["--only-for", "--lr 1", "x.py"], "--only-for --lr 1: is not among the schedules"),
    (["--schedules", "", "x.py"], "unknown"),
    (["--report-only"], "is no plan"),
    (["nowhere.py"], "nowhere.py does not exist"),
])
def test_nonsense_is_refused_with_the_reason(words, reason, tmp_path, capsys):
    assert run_command("--output", str(tmp_path / "o"), *words) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(capsys):
    assert run_command("--output", str(ROOT / "Makefile"), "--nproc", "2",
                       str(ROOT / "examples/pretrain_gpt.py")) == 2
    assert "cannot write there" in capsys.readouterr().err


def test_what_cannot_run_is_told_before_anything_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "problems", lambda plan: {"1f1b": [], "paci": ["why. Remedy: x."]})
    monkeypatch.setattr(command, "compare", None)
    assert run_command("--output", str(tmp_path), "--schedules", "1f1b,paci",
                       str(ROOT / "examples/pretrain_gpt.py")) == 2
    assert "PACI: why. Remedy: x.\n" in capsys.readouterr().err


def test_text_is_escaped():
    blocks = [Heading("a & b"), Paragraph("<c>", lead=True), Table([["", "x|y"], ["r", "1"]])]
    assert "<h2>a &amp; b</h2>" in to_html("t", blocks) and "&lt;c&gt;" in to_html("t", blocks)
    assert "|  | x\\|y |\n| --- | ---: |\n| r | 1 |" in to_markdown("t", blocks)
