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

    def judge(extra):
        return check._judge((BASE + extra).split(), "train.py")

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
