"""megatron_paci/compare/check.py: what cannot run is found before it is run."""

from __future__ import annotations

import pytest

import megatron_paci
from megatron_paci.compare import check

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 "
    "--global-batch-size 16 --pipeline-model-parallel-size 2 "
    "--untie-embeddings-and-output-weights --a-flag-of-the-script "
)


@pytest.fixture
def judge(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", [])
    megatron_paci.install()

    def judge(extra, **short):
        return check._judge((BASE + extra).split(), "train.py", short or None)

    yield judge
    megatron_paci.uninstall()


INTERLEAVED = "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2 "


@pytest.mark.parametrize("extra", [
    "--pipeline-schedule 1f1b", INTERLEAVED, "--pipeline-schedule paci --paci-accum 4"])
def test_what_can_run_has_no_problems(judge, extra):
    assert judge(extra) == []


@pytest.mark.parametrize("extra, reason", [
    ("--pipeline-schedule paci --paci-accum 3", "--paci-accum 3: does not divide the 8 microb"),
    ("--pipeline-schedule paci --fp8-format hybrid", "--fp8-format"),
    (INTERLEAVED + "--global-batch-size 18", "groups of 2 microbatches"),
    (INTERLEAVED + "--pipeline-model-parallel-size 1", "only one pipeline stage"),
    ("--pipeline-schedule 1f1b --pipeline-model-parallel-size 3", "2 processes are no multiple"),
    ("--pipeline-schedule 1f1b --num-layers many", "argument --num-layers: invalid int value"),
])
def test_what_cannot_run_is_told(judge, extra, reason):
    [problem] = judge(extra)
    assert reason in problem


SHORT = "--pipeline-schedule 1f1b --exit-interval 300 "


@pytest.mark.parametrize("extra", ["--train-iters 300", "--train-samples 4800", ""])
def test_a_short_run_that_fits_has_no_problems(judge, extra):
    assert judge(SHORT + extra, done=0, last=300) == []


@pytest.mark.parametrize("extra, reason", [
    ("--train-iters 299", "300 iterations go beyond the 299 of the training. Remedy"),
    ("--train-samples 4799", "300 iterations go beyond the 299 of the training. Remedy"),
    ("--train-iters 300 --load nowhere", "--load nowhere: holds no checkpoint"),
    # From --only-for.
    ("--train-iters 300 --save x", "or save to x. Remedy: none of --load, --save"),
    ("--train-iters 300 --exit-interval 200", "end after 200 and not 300"),
])
def test_a_short_run_that_would_not_be_one_is_told(judge, extra, reason):
    [problem] = judge(SHORT + extra, done=0, last=300)
    assert reason in problem


def test_a_short_run_from_a_checkpoint_ends_within_the_training(judge, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    command = f"--pipeline-schedule 1f1b --exit-interval 400 --load {tmp_path} --train-iters "
    assert judge(command + "400", done=100, last=400) == []
    [problem] = judge(command + "399", done=100, last=400)
    assert "300 iterations after the checkpoint's 100 go beyond the 399" in problem
    [problem] = judge(command + "400", done=90, last=400)
    assert "begin after iteration 100 and not 90" in problem
