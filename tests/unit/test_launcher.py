"""The command line, up to the point where a run is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_paci.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 255 --train-iters 2 --lr 1e-3 "
    "--pipeline-model-parallel-size 2 --pipeline-schedule paci"
).split()


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the launcher as one rank of two, without an address at which the ranks could meet."""
    return subprocess.run(
        [sys.executable, "-m", "megatron_paci", *arguments],
        env=os.environ | {"WORLD_SIZE": "2", "RANK": "0", "PYTHONPATH": str(ROOT)} | environment,
        capture_output=True, text=True, timeout=120,
    )


@pytest.mark.parametrize(
    "script, words", [("no_such_script.py", "does not exist"), (str(ROOT), "is a folder")]
)
def test_a_missing_script_is_one_message(script, words, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["run", script, "--lr", "1"]) == 2
    error = capsys.readouterr().err
    assert script in error and words in error and "pretrain_gpt.py" in error
    assert len(error.splitlines()) == 1


def test_only_rank_0_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main(["run", "no_such_script.py"]) == 2
    assert capsys.readouterr().err == ""


def test_a_script_runs_as_main_with_its_folder_first(tmp_path):
    (tmp_path / "neighbour.py").write_text("value = 7\n")
    (tmp_path / "script.py").write_text(
        "import sys, neighbour, torch\n"
        "assert __name__ == '__main__' and sys.path[0] == __file__.rsplit('/', 1)[0]\n"
        "assert torch.cuda.is_available()  # what --device cpu makes Megatron believe\n"
        "from megatron.core.pipeline_parallel import get_forward_backward_func as f\n"
        "print('ran', neighbour.value, sys.argv[1:3], hasattr(f, '__wrapped__'))\n"
    )
    done = launch("run", "--device", "cpu", str(tmp_path / "script.py"), "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert "ran 7 ['--lr', '1'] True" in done.stdout


def test_a_refused_run_lists_everything_and_makes_no_process_group():
    done = launch(
        "run", "--device", "cpu", str(ROOT / "examples/pretrain_gpt.py"), *FLAGS,
        "--paci-accum", "3", "--sft", "--num-virtual-stages-per-pipeline-rank", "2",
        "--log-params-norm",
    )
    assert done.returncode == 2, done.stderr
    message = done.stderr[done.stderr.index("megatron_paci: error:"):]
    for words in ("--paci-accum 3", "1 or 2 or 4 or 8", "packed", "virtual", "--log-params-norm"):
        assert words in message
    assert message.count("Remedy:") == 4
    assert "Traceback" not in done.stderr and "initializing torch distributed" not in done.stdout


def test_a_changed_megatron_is_an_error_and_nothing_is_hooked(tmp_path):
    (tmp_path / "script.py").write_text("print('must not run')\n")
    (tmp_path / "sitecustomize.py").write_text(
        "import megatron.training.training as t\n"
        "def evaluate(model): ...\n"
        "t.evaluate = evaluate\n"
    )
    done = launch("run", str(tmp_path / "script.py"),
                  PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert done.returncode == 2 and "must not run" not in done.stdout, done.stderr
    assert "training:evaluate: expected parameters (forward_step_func, " in done.stderr
