"""PACI together with the other ways of splitting a model over ranks, on four ranks."""

from __future__ import annotations

import pytest

from tests.gloo.launch import TINY_GPT, flags, launch

EVERY = "--eval-interval 1 --eval-iters 1 --clip-grad 0"
TIED = TINY_GPT.replace(" --untie-embeddings-and-output-weights", "")
TENSOR = "--tensor-model-parallel-size 2"
SHARDED = "--use-distributed-optimizer"
SETUPS = {
    # name: (flags, base); with tensor parallel 2 there are two stages, else two replicas of two
    "tp": (TENSOR, TINY_GPT),
    "tp-tied": (TENSOR, TIED),
    "sp-bf16": (f"{TENSOR} --sequence-parallel --bf16", TINY_GPT),
    "dp": ("", TINY_GPT),
    "dp-overlap": ("--overlap-grad-reduce", TINY_GPT),
    "dp-tied-bf16": ("--bf16 --accumulate-allreduce-grads-in-fp32", TIED),
    "sharded": (SHARDED, TINY_GPT),
    "sharded-overlap": (f"{SHARDED} --overlap-grad-reduce", TINY_GPT),
    "sharded-overlaps": (f"{SHARDED} --overlap-grad-reduce --overlap-param-gather", TINY_GPT),
    "sharded-overlaps-bf16": (
        f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --bf16", TINY_GPT
    ),
    "sharded-tied": (SHARDED, TIED),
    "sharded-tied-overlaps-bf16": (
        f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --bf16", TIED
    ),
}
# Gathering late or early, reducing late or early: the same numbers.
SAME = [("sharded", "sharded-overlap"), ("sharded", "sharded-overlaps"), ("dp", "dp-overlap")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    scenarios = {}
    for name, (extra, base) in SETUPS.items():
        command = flags(2, f"{EVERY} {extra}", base)
        scenarios[f"stock-{name}"] = {"arguments": command, "plugin": False}
        scenarios[f"paci-{name}"] = {"arguments": [*command, "--pipeline-schedule", "paci"]}
        stream = flags(2, f"--pipeline-schedule paci --paci-accum 2 {extra}", base)
        scenarios[f"stream-{name}"] = {"arguments": stream}
    scenarios["again"] = {**scenarios["stream-sharded-overlaps"], "sleep_ms": 5}
    return launch(4, scenarios, tmp_path_factory.mktemp("parallel"), seconds=500)


@pytest.mark.parametrize("name", SETUPS)
def test_4_drained_every_window_equals_1f1b(ranks, name):
    for stock, paci in zip(ranks[f"stock-{name}"], ranks[f"paci-{name}"], strict=True):
        for key in ("losses", "evaluations", "weights", "optimizer", "learning_rate"):
            assert paci[key] == stock[key]


@pytest.mark.parametrize("name", [name for name in SETUPS if not name.startswith(("tp", "sp"))])
def test_replicas_stay_equal_while_the_stream_runs(ranks, name):
    first, copy, last, last_copy = ranks[f"stream-{name}"]
    assert first["weights"] == copy["weights"] != last["weights"] == last_copy["weights"]
    assert last["losses"] == last_copy["losses"]


@pytest.mark.parametrize("one, other", SAME)
def test_overlapping_communication_changes_no_number(ranks, one, other):
    for first, second in zip(ranks[f"stream-{one}"], ranks[f"stream-{other}"], strict=True):
        assert first["losses"] == second["losses"] and first["weights"] == second["weights"]


def test_sharding_the_optimizer_changes_next_to_nothing(ranks):
    """Not bitwise: Megatron itself sums gradients in another order then."""
    for first, second in zip(ranks["stream-dp"][2]["losses"], ranks["stream-sharded"][2]["losses"]):
        assert first["lm loss"] == pytest.approx(second["lm loss"], rel=1e-5)


def test_7_two_runs_are_equal_whatever_the_timing(ranks):
    for first, second in zip(ranks["again"], ranks["stream-sharded-overlaps"], strict=True):
        assert (first["losses"], first["weights"]) == (second["losses"], second["weights"])
