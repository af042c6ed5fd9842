"""examples/demo.py and megatron_paci/report_runs.py: from records to figures, without training."""

import importlib.util
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_paci import report_runs

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("paci_demo", ROOT / "examples" / "demo.py")
demo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo)

BYTES = {"parameters": 4_000_000, "gradients": 4_000_000, "optimizer": 8_000_000}


def record(stage, *, losses=(8.0, 7.0, 6.0, 5.0, 4.0), ends=(1.0, 2.0, 3.0, 3.5, 4.0), paci=True):
    """A record of one of two stages; the losses are the last one's."""
    last = stage == 1
    return {
        "losses": [{"lm loss": loss} if last else {} for loss in losses],
        "grad_norms": [None] * len(losses),
        "seconds_at_end": list(ends),
        "counted_iterations": min(3, len(losses)),
        "evaluations": [
            {"after_iterations": len(losses), "losses": {"lm loss": loss} if last else {}}
            for loss in (5.5, 4.5)
        ],
        "bytes": {**BYTES, "activations_peak": (2 - stage) * 1_500_000},
        "paci": {"drift_max": 1 - stage, "drift_bound": 1 - stage, "in_flight_max": 2 - stage}
        if paci else None,
    }


def figures(*, paci=True, **changes):
    records = [record(0, paci=paci, **changes), record(1, paci=paci, **changes)]
    return report_runs.run_figures(records, samples_per_iteration=8, sequence_length=100)


@pytest.fixture
def report():
    """A report of two made-up runs."""
    runs = {"1f1b": figures(paci=False), "paci": figures(ends=(1.0, 2.0, 3.0, 3.4, 3.8))}
    corpus = {"parameters": {"input": [], "vocab_size": 64},
              "splits": {"train": {"documents": 3, "tokens": 30}}}
    return demo.build_report(runs, iterations=5, corpus=corpus)


def test_figures_of_a_run():
    run = figures()
    assert run["loss"] == [8.0, 7.0, 6.0, 5.0, 4.0]
    assert run["final_loss"] == 6.0
    assert run["valid_loss"] == 4.5
    assert (run["drift_max"], run["drift_bound"], run["in_flight_max"]) == ([1, 0], [1, 0], [2, 1])
    assert [stage["activations_peak"] for stage in run["bytes"]] == [3_000_000, 1_500_000]
    assert "drift_max" not in figures(paci=False)


def test_throughput_leaves_the_counted_iterations_out_and_waits_for_the_slowest_rank():
    records = [record(0), record(1, ends=(9.0, 9.5, 10.0, 11.0, 12.0))]
    assert report_runs.tokens_per_second(records, tokens_per_iteration=800) == 2 * 800 / 2.0


def test_no_throughput_without_iterations_to_time():
    records = [record(i, losses=(8.0, 7.0), ends=(1.0, 2.0)) for i in range(2)]
    assert report_runs.tokens_per_second(records, tokens_per_iteration=800) is None
    assert "-" in report_runs.comparison_table({"paci": figures(losses=(8.0,), ends=(1.0,))})


def test_no_validation_loss_without_evaluation():
    assert report_runs.validation_loss([{"evaluations": []}]) is None


def test_a_record_without_losses_is_refused():
    with pytest.raises(report_runs.RecordError, match="lm loss"):
        report_runs.run_figures([record(0)], samples_per_iteration=8, sequence_length=100)


def test_records_are_read_in_the_order_of_the_ranks(tmp_path):
    for rank in range(11):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"rank": rank}))
    assert [entry["rank"] for entry in report_runs.read_records(tmp_path)] == list(range(11))


@pytest.mark.parametrize("files, reason", [
    ({}, "no rank"),
    ({"rank1.json": "{}"}, "rank 0"),
    ({"rank0.json": "{"}, "cannot be read"),
])
def test_incomplete_records_are_refused(tmp_path, files, reason):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(report_runs.RecordError, match=reason):
        report_runs.read_records(tmp_path)


def test_speedup_is_measured_and_set_beside_theory(report):
    assert report["speedup"] == {"measured": pytest.approx(1.25), "theory": 1.25}
    assert "1.25 measured, 1.25 at most in theory" in report_runs.speedup_text(report)
    alone = report_runs.speedup({"1f1b": report["runs"]["1f1b"]}, stages=2, microbatches=4)
    assert alone["measured"] is None
    assert "not measured" in report_runs.speedup_text({**report, "speedup": alone})
    assert "Measure again" not in report_runs.speedup_text(report)
    noisy = {**report, "speedup": {"measured": 1.7, "theory": 1.25}}
    assert "Measure again" in report_runs.speedup_text(noisy)
    assert "share 1 core" in report_runs.speedup_text({**report, "cores": 1})


def test_table_is_aligned_and_fits_a_screen(report):
    header, rule, *rows = report_runs.comparison_table(report["runs"]).splitlines()
    assert header.split() == ["1F1B", "PACI"]
    assert {len(line) for line in (header, rule, *rows)} == {len(header)}
    assert len(header) <= 100
    cells = {row[:-24].strip(): row[-24:].split() for row in rows}
    assert cells["throughput (tokens/s)"] == ["1,600", "2,000"]
    assert rows[3].endswith("1 / 1")
    assert cells["activations kept for backward, peak (MB), stage 0"] == ["3.0", "3.0"]


def test_report_is_strict_json_with_one_line_per_list(report):
    report["runs"]["paci"]["loss"] = [1.0, float("nan"), float("inf")]
    text = report_runs.to_json(report)
    assert '"loss": [ 1.0, null, null ]' in text
    loaded = json.loads(text)
    assert loaded["runs"]["1f1b"]["loss"] == [8.0, 7.0, 6.0, 5.0, 4.0]
    assert loaded["runs"]["paci"]["in_flight_max"] == [2, 1]
    assert set(loaded["versions"]) == {"python", "torch", "megatron-core", "megatron_paci"}


def test_progress_is_read_from_the_lines_of_iterations():
    line = (" [2026-01-01 00:00:00] iteration       19/     300 | consumed samples:          152 | "
            "learning rate: 1.0E-04 | lm loss: 6.423179E+00 | loss scale: 1.0 |")
    assert report_runs.progress(line) == (19, 6.423179)
    assert report_runs.progress(" validation loss at iteration 20 | lm loss value: 6.4E+00") is None


def test_failure_shows_the_reason_and_not_the_launchers_remarks():
    launcher = ("E0101 00:00:00.0 1 torch/distributed/elastic/multiprocessing/api.py:1010] failed "
                "(exitcode: 1)\nTraceback (most recent call last):\nChildFailedError\n")
    log = "a.py:1: UserWarning: x\n  warnings.warn(\n\nTraceback ...\nValueError: bad\n" + launcher
    assert report_runs.failure(log) == "Traceback ...\nValueError: bad"
    refused = "noise\nmegatron_paci: error: cannot run:\n- why. Remedy: what.\n" + launcher
    assert report_runs.failure(refused) == "megatron_paci: error: cannot run:\n- why. Remedy: what."
    assert report_runs.failure("") == "(the log is empty)"


def test_runs_differ_in_the_schedule_alone_and_name_no_foreign_paths():
    flags = demo.training_flags(iterations=40, corpus=Path("/elsewhere/corpus"))
    commands = {
        name: demo.launch_command(name, flags=flags, record=Path("out/demo"))
        for name in demo.SCHEDULES
    }
    only = set(commands["paci"]) - set(commands["1f1b"])
    assert only == {"paci", "--paci-accum"}  # its value, 4, is also that of another flag
    shown = demo.public_command(commands["paci"])
    assert shown.startswith("python -m torch.distributed.run") and "/elsewhere" not in shown
    assert "--train-data-path train_text_document" in shown


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
    """Run the demo with a script in the place of training; return (status, stdout, stderr)."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "corpus.json").write_text(json.dumps({
        "parameters": {"input": [], "vocab_size": 64}, "splits": {"train": {"tokens": 30}},
        "sha256": {}}))
    for name, paci in (("1f1b", False), ("paci", True)):
        for rank in range(2):
            (tmp_path / f"{name}{rank}").write_text(json.dumps(record(rank, paci=paci)))

    def run_fake(script):
        def command(schedule, *, flags, record):
            return [sys.executable, "-c", textwrap.dedent(script), schedule, str(record),
                    str(tmp_path)]

        monkeypatch.setattr(demo, "launch_command", command)
        monkeypatch.setattr(demo.plots, "plot_losses", lambda runs, path, **_: path.touch())
        args = demo.parse_arguments(
            ["--output", str(tmp_path / "out"), "--corpus", str(corpus), "--iterations", "20"])
        status = demo.demo(args)
        return status, *capsys.readouterr()

    return run_fake


WRITE_RECORDS = """
    import pathlib, sys
    schedule, folder, source = sys.argv[1], *map(pathlib.Path, sys.argv[2:])
    folder.mkdir(parents=True, exist_ok=True)
    for rank in "01":
        (folder / f"rank{rank}.json").write_text((source / (schedule + rank)).read_text())
"""


def test_both_runs_are_reported(run_fake, tmp_path):
    status, out, err = run_fake(WRITE_RECORDS)
    assert status == 0 and "PACI / 1F1B" in out, err
    assert [line.split()[0] for line in out.splitlines()[-2:]] == ["report:", "plot:"]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(report["runs"]) == ["1f1b", "paci"]
    assert (tmp_path / "out" / "loss.png").exists()


def test_what_was_made_before_a_failure_is_kept_and_nothing_older(run_fake, tmp_path):
    for stale in ("loss.png", "paci/rank0.json"):
        path = tmp_path / "out" / stale
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    status, out, err = run_fake(WRITE_RECORDS + """
    if schedule == "paci":
        (folder / "rank0.json").unlink()
        sys.exit("the reason")
    """)
    assert status == 1
    assert "PACI failed with exit status 1" in err and "the reason" in err
    assert list(json.loads((tmp_path / "out" / "report.json").read_text())["runs"]) == ["1f1b"]
    assert not (tmp_path / "out" / "paci" / "rank0.json").exists()


def test_a_run_that_says_nothing_is_stopped(run_fake, monkeypatch):
    started = []
    popen = subprocess.Popen

    def remember(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(demo.subprocess, "Popen", remember)
    monkeypatch.setattr(demo, "STALL_SECONDS", 0.5)
    # The handlers that stopping sets are for the process's last seconds, not for the tests'.
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    status, _, err = run_fake("import time; time.sleep(60)")
    assert status == 1 and "wrote nothing" in err
    assert started[0].poll() is not None


def test_figures_and_plots_are_made_without_torch():
    code = "import sys, megatron_paci.plots; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
