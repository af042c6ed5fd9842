"""The harness itself: a hang ends, says where, and leaves nothing behind."""

from __future__ import annotations

import subprocess

import pytest

from tests.gloo.launch import RankError, flags, launch


def test_a_hang_is_ended_and_every_rank_says_what_it_was_doing(tmp_path):
    scenario = {
        "arguments": flags(2, "--pipeline-schedule paci --paci-accum 2"),
        "hang": {"rank": 1, "action": "B1", "seconds": 5},
    }
    with pytest.raises(RankError) as caught:
        launch(2, {"hang": scenario}, tmp_path, seconds=120, fresh=True)
    message = str(caught.value)
    assert "rank 1: no end after 5 s; rank 1 (pipeline of ranks 0 1), iteration 1 " in message
    # The other one has its gradient and waits for the report behind it.
    assert "PACI stage 0 of 2, accumulation 2: in action STEP" in message
    assert "last actions F0 F1 B0 F2 B1\n" in message
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert left.stdout == ""


def test_an_error_in_one_rank_ends_all_with_the_real_reason(tmp_path):
    scenario = {"arguments": flags(2, "--pipeline-schedule paci --no-such-flag")}
    with pytest.raises(RankError, match="no-such-flag"):
        launch(2, {"wrong": scenario}, tmp_path, seconds=120, fresh=True)
