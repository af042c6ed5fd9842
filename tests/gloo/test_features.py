"""Features of a model or a run that a user combines with the schedule; compared to the last bit.

Drained after every window, PACI equals Megatron's own 1F1B with the same flags; the stream equals
the replay (replay.py).
"""

from __future__ import annotations

import pytest

from tests.gloo.launch import flags, launch
from tests.gloo.scenarios import drained_pair, replay_of

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
TWO = {
    "llama": "--position-embedding-type rope --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --normalization RMSNorm --ffn-hidden-size 96",
    "muon": "--optimizer muon --bf16",
    "lion": "--optimizer lion",
    "soap": "--optimizer soap",
}
FOUR = {
    "layout": "--num-layers 6 --pipeline-model-parallel-layout Ett|t|tt|tL",
    "first-without-layers": "--pipeline-model-parallel-layout E|tt|t|tL",
    "last-without-layers": "--pipeline-model-parallel-layout Et|tt|t|L",
}
REPLAYED = {
    "bf16": "--bf16",
    "recompute-block": "--recompute-granularity full --recompute-method block "
    "--recompute-num-layers 1",
    "recompute-selective": "--recompute-granularity selective",
    "rates": "--decoupled-lr 3e-2 --decoupled-min-lr 1e-3 --start-weight-decay 0.01 "
    "--end-weight-decay 0.2 --weight-decay-incr-style cosine",
    "lion": "--optimizer lion",
}


def pairs(num_stages: int, variants: dict[str, str]) -> dict[str, dict]:
    scenarios = {}
    for name, extra in variants.items():
        scenarios |= drained_pair(name, num_stages, extra)
    return scenarios


def streams(folder) -> dict[str, dict]:
    return {
        f"stream-{name}": {
            "arguments": flags(
                2, f"--clip-grad 0.3 --pipeline-schedule paci --paci-accum 2 {REPLAYED[name]}"
            ),
            "save_initial": str(folder / name),
        }
        for name in REPLAYED
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def two(folder):
    return launch(2, pairs(2, TWO) | streams(folder), folder / "two", seconds=300)


@pytest.fixture(scope="module")
def four(folder):
    return launch(4, pairs(4, FOUR), folder / "four", seconds=300)


@pytest.fixture(scope="module")
def one(folder, two):
    scenarios = {
        name: replay_of(folder / name, f"--clip-grad 0.3 {extra}")
        for name, extra in REPLAYED.items()
    }
    return launch(1, scenarios, folder / "one", seconds=300)


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_4_drained_every_window_equals_1f1b(two, four, name):
    runs = two if name in TWO else four
    for stock, paci in zip(runs[f"stock-{name}"], runs[f"paci-{name}"], strict=True):
        for key in ("losses", "evaluations", "weights", "optimizer", "learning_rate"):
            assert paci[key] == stock[key], key
    assert runs[f"paci-{name}"][0]["actions"]


@pytest.mark.parametrize("name", REPLAYED)
def test_5_a_stream_equals_its_replay(two, one, name):
    ranks, replay = two[f"stream-{name}"], one[name][0]
    assert ranks[-1]["losses"] == replay["losses"] and len(replay["losses"]) == 4
    assert [rank["weights"] for rank in ranks] == replay["weights"]
