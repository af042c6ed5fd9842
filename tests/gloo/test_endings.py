"""How a run ends: with which status, in which state, and what it says; each in its own processes.

The numbers are those of docs/scenarios.md.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megatron_paci.bench.ranks import run_ranks
from tests.gloo.launch import flags

PROGRAM = str(Path(__file__).with_name("endings.py"))
PACI = "--pipeline-schedule paci --paci-accum 4"
SAVE = "--ckpt-format torch --save"  # the quicker format; the others are in test_reports.py
REFUSED = {
    # name: (flags, what the message names: the flag as it was typed, and a valid value)
    "zero": ("--pipeline-schedule paci --paci-accum 0", ["--paci-accum 0", "--paci-accum 4"]),
    "negative": ("--pipeline-schedule paci --paci-accum -1", ["--paci-accum -1", "at least 1"]),
    "fraction": ("--pipeline-schedule paci --paci-accum 2.5", ["--paci-accum 2.5", "whole number"]),
    "virtual": (
        f"{PACI} --num-virtual-stages-per-pipeline-rank 2",
        ["--num-virtual-stages-per-pipeline-rank 2: virtual stages", "Remedy: drop"],
    ),
    "alone": ("--paci-accum 4", ["--paci-accum 4", "add --pipeline-schedule paci"]),
    "unknown": (
        "--pipeline-schedule zigzag",
        ["--pipeline-schedule zigzag", "auto, 1f1b, interleaved, paci"],
    ),
}
ENDED = ("all", "interval", "interval-saved")


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("endings")
    scenarios = {
        "all": {"arguments": flags(2, PACI)},
        "interval": {"arguments": flags(2, f"{PACI} --exit-interval 3")},
        "interval-saved": {
            "arguments": flags(
                2, f"{PACI} --exit-interval 3 --save-interval 9 {SAVE} {folder / 'interval'}"
            ),
        },
        "terminated": {
            "arguments": flags(
                2, f"{PACI} --train-iters 900 --lr-decay-iters 900 --exit-signal-handler "
                f"--save-interval 900 {SAVE} {folder / 'signal'}",
            ),
            "terminate_after": 3,
        },
        "spoilt": {"arguments": flags(2, PACI), "script": "tests/gloo/spoilt_gpt.py"},
        "uneven": {
            "arguments": flags(4, f"{PACI} --num-layers 6"), "environment": {"WORLD_SIZE": "4"},
        },
    }
    scenarios |= {name: {"arguments": flags(2, extra)} for name, (extra, _) in REFUSED.items()}
    common = {"script": "examples/pretrain_gpt.py", "size": 2}
    runs = [common | each for each in scenarios.values()]
    seconds = 150 * float(os.environ.get("TEST_TIME_FACTOR", "1"))
    results = run_ranks(1, runs, folder, seconds=seconds, program=[PROGRAM])
    return {name: ranks for name, [ranks] in zip(scenarios, results)}, folder


# 24: every way to end


@pytest.mark.parametrize("name", ENDED)
def test_every_rank_ends_with_status_0_and_nobody_misses_anybody(endings, name):
    for rank in endings[0][name]:
        assert rank["status"] == 0, rank["output"]
        assert not re.search("closed by peer|Traceback|Error:", rank["output"])
    iterations = re.findall(r"iteration +(\d+)/", endings[0][name][1]["output"])
    assert iterations[-1] == ("4" if name == "all" else "3")


def test_ending_by_interval_saves_where_it_was_told_to(endings):
    runs, folder = endings
    saved = folder / "interval/latest_checkpointed_iteration.txt"
    assert saved.read_text() == "3"
    assert "saved checkpoint" not in runs["interval"][0]["output"]


def test_an_error_on_one_stage_ends_all_and_the_real_one_is_shown(endings):
    first, last = endings[0]["spoilt"]
    assert first["status"] != 0 and last["status"] != 0
    assert "modified by an inplace operation" in last["output"]
    assert "rank 1 (pipeline of ranks 0 1), iteration 1 since the start, training" in last["output"]
    assert "PACI stage 1 of 2, accumulation 4: in action B5" in last["output"]
    # The other stage says what it was waiting for.
    assert "PACI stage 0 of 2, accumulation 4: in action" in first["output"]


# 19: SIGTERM to all workers, as torchrun passes it on


def test_a_signal_lets_all_ranks_save_and_end_at_the_same_iteration(endings):
    runs, folder = endings
    for rank in runs["terminated"]:
        assert rank["status"] == 0, rank["output"]
        assert not re.search("closed by peer|Traceback", rank["output"])
    last = int(re.findall(r"iteration +(\d+)/", runs["terminated"][1]["output"])[-1])
    saved = folder / "signal/latest_checkpointed_iteration.txt"
    assert 3 < last == int(saved.read_text()) < 900


# 31, 32: what cannot run


def test_megatrons_own_refusal_of_an_uneven_split_is_left_alone(endings):
    for rank in endings[0]["uneven"]:
        assert rank["status"] != 0
        assert "should be divisible by the pipeline" in rank["output"]
        assert "megatron_paci: error" not in rank["output"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_ends_at_once_on_all_ranks_with_one_message(endings, name):
    first, other = endings[0][name]
    assert first["status"] == other["status"] == 2
    for words in REFUSED[name][1]:
        assert words in first["output"]
    for rank in (first, other):
        for later in ("Traceback", "initializing torch distributed", "building GPT model"):
            assert later not in rank["output"]
    assert "megatron_paci: error" not in other["output"]
