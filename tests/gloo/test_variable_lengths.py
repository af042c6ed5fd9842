"""Messages of different shapes (CASE 13: one that does not fit is an error, never cut)."""

from __future__ import annotations

import pytest

from tests.gloo.launch import TINY_GPT, flags, launch
from tests.gloo.scenarios import TIED, drained_pair, replay_of

# Megatron wants this dispatcher whenever lengths vary, even without experts.
VARIABLE = "--moe-token-dispatcher-type alltoall"
SCRIPT = "tests/gloo/variable_gpt.py"
STREAMS = {"a2": (2, TINY_GPT), "a8": (8, TIED)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("variable")


@pytest.fixture(scope="module", params=[2, 4])
def runs(request, folder):
    num_stages = request.param
    scenarios = drained_pair("variable", num_stages, VARIABLE)
    for name, (accumulation, base) in STREAMS.items():
        scenarios[name] = {
            "arguments": flags(
                num_stages,
                f"--clip-grad 0.3 --pipeline-schedule paci --paci-accum {accumulation} {VARIABLE}",
                base,
            ),
            "save_initial": str(folder / f"{name}-{num_stages}"),
        }
    for scenario in scenarios.values():
        scenario["script"] = SCRIPT
    return num_stages, launch(num_stages, scenarios, folder / str(num_stages), seconds=200)


@pytest.fixture(scope="module")
def replays(runs, folder):
    num_stages, _ = runs
    scenarios = {
        name: replay_of(
            folder / f"{name}-{num_stages}", f"--clip-grad 0.3 {VARIABLE}", base,
            num_stages=num_stages, accumulation=accumulation,
        ) | {"script": SCRIPT}
        for name, (accumulation, base) in STREAMS.items()
    }
    return launch(1, scenarios, folder / f"one-{num_stages}", seconds=200)


def test_4_drained_every_window_equals_1f1b(runs):
    _, found = runs
    for stock, paci in zip(found["stock-variable"], found["paci-variable"], strict=True):
        for key in ("losses", "evaluations", "weights", "optimizer"):
            assert paci[key] == stock[key]


def test_5_a_stream_equals_its_replay(runs, replays):
    _, found = runs
    for name in STREAMS:
        replay = replays[name][0]
        assert found[name][-1]["losses"] == replay["losses"] and len(replay["losses"]) == 4
        assert [rank["weights"] for rank in found[name]] == replay["weights"]
