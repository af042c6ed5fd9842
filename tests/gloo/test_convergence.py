"""Runs of experiments on convergence; what they train is compared in test_reports.py."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("convergence_run.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convergence")
    words = random.Random(1).choices(["def", "return", "the", "pipeline", "of", "stages"], k=2000)
    for name in ("train.txt", "validation.txt"):
        (folder / name).write_text(" ".join(words))
    subprocess.run([sys.executable, SCRIPT, folder], check=True, capture_output=True)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_a_run_that_was_stopped_goes_on_to_the_same_numbers(found):
    assert found["resumed"] == found["whole"]


def test_a_run_follows_its_schedule_and_learns(found):
    whole = found["whole"]
    assert len(whole["losses"]) == 20 and len(whole["validation"]) == 4
    assert whole["drift_max"] == 3  # with an accumulation of 1, which is not the last one
    assert whole["validation"][-1][1] < whole["validation"][0][1]


def test_a_gradient_that_is_not_finite_ends_a_run(found):
    """Also where the loss is a good one, for the window's update is left out."""
    assert found["diverged"]["diverged"] == 1 and found["diverged"]["skipped"] > 0
    assert found["diverged"]["losses"] == found["whole"]["losses"][:1]


def test_stages_update_with_what_the_settings_say(found):
    """PipeMare's rule: after 24 of 120 samples the rate is divided by the delay to the 0.8."""
    for index, stage in enumerate(found["stages"]):
        delay = max(1, (4 - 1 - index) / 2)
        assert stage["factor"] == pytest.approx(delay**-0.8)
        assert (stage["optimizer"], stage["decoupled"]) == ("NAdam", True)
        assert stage["betas"] == [0.9, 0.95]
