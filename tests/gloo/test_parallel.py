"""PACI together with the other ways of splitting a model over ranks, on four and eight ranks."""

from __future__ import annotations

import json

import pytest

from tests.gloo.launch import TINY_GPT, flags, launch
from tests.gloo.scenarios import EVERY, TIED, drained_pair, replay_of, variant_flags

TENSOR = "--tensor-model-parallel-size 2"
SHARDED = "--use-distributed-optimizer"
OVERLAPS = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
# As many microbatches, of as many tokens on each rank, as with two replicas. That also lets
# Megatron's warm-up draw as many random numbers before the weights are.
CONTEXT = "--context-parallel-size 2 --micro-batch-size 4"
SETUPS = {
    # name: (flags, base); each of the two stages has two ranks, replicas where nothing else is said
    "tp": (TENSOR, TINY_GPT),
    "tp-tied": (TENSOR, TIED),
    "sp-bf16": (f"{TENSOR} --sequence-parallel --bf16", TINY_GPT),
    "dp": ("", TINY_GPT),
    "dp-overlap": ("--overlap-grad-reduce", TINY_GPT),
    "dp-tied-bf16": ("--bf16 --accumulate-allreduce-grads-in-fp32", TIED),
    "sharded": (SHARDED, TINY_GPT),
    "sharded-overlap": (f"{SHARDED} --overlap-grad-reduce", TINY_GPT),
    "sharded-overlaps": (OVERLAPS, TINY_GPT),
    "sharded-overlaps-bf16": (f"{OVERLAPS} --bf16", TINY_GPT),
    "cp": (CONTEXT, TINY_GPT),
    "cp-sharded-dropout": (
        f"{CONTEXT} {OVERLAPS} --calculate-per-token-loss --recompute-granularity selective "
        "--position-embedding-type rope --attention-dropout 0.1 --hidden-dropout 0.1", TINY_GPT
    ),
    "sharded-tied": (SHARDED, TIED),
    "sharded-tied-overlaps-bf16": (
        f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --bf16", TIED
    ),
}
# Streams that are replayed; each of two processes replays its part of both stages.
REPLAYED = ("tp", "tp-tied", "sp-bf16", "dp", "dp-tied-bf16", "sharded-overlaps", "sharded-tied",
            "sharded-tied-overlaps-bf16", "cp")
# The same with a deferred step, and more microbatches in flight than its link needs.
DEFERRED = {
    "dp": (0, True), "dp-overlap": (0, True), "sharded-overlaps": (0, True),
    "sharded-tied-overlaps-bf16": (1, True),
}
# Gathering late or early, reducing late or early: the same numbers.
SAME = [("stream-sharded", "stream-sharded-overlap"), ("stream-sharded", "stream-sharded-overlaps"),
        ("stream-dp", "stream-dp-overlap"), ("deferred-stream-dp", "deferred-stream-dp-overlap")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def ranks(folder):
    scenarios = {}
    for name, (extra, base) in SETUPS.items():
        scenarios |= drained_pair(name, 2, extra, base)
        stream = flags(2, f"--pipeline-schedule paci --paci-accum 2 {extra}", base)
        scenarios[f"stream-{name}"] = {
            "arguments": stream, "save_initial": str(folder / name) if name in REPLAYED else None
        }
    for name, variant in DEFERRED.items():
        for kind in ("paci", "stream"):
            arguments = scenarios[f"{kind}-{name}"]["arguments"]
            scenarios[f"deferred-{kind}-{name}"] = {
                "arguments": [*arguments, *variant_flags(*variant).split()]
            }
    scenarios["again"] = {
        **scenarios["stream-sharded-overlaps"], "save_initial": None, "sleep_ms": 5
    }
    scenarios["attention"] = {
        "script": "tests/gloo/attention_ranks.py", "arguments": [str(folder)]
    }
    found = launch(4, scenarios, folder, seconds=600)
    found["attention"] = [
        json.loads((folder / f"attention.rank{rank}.json").read_text()) for rank in range(4)
    ]
    return found


@pytest.fixture(scope="module")
def replays(folder, ranks):
    scenarios = {name: replay_of(folder / name, *SETUPS[name]) for name in REPLAYED}
    for name, (extra, deferred) in DEFERRED.items():
        if name in REPLAYED:
            scenarios[f"deferred-{name}"] = replay_of(
                folder / name, *SETUPS[name], extra_in_flight=extra, defer_step=deferred
            )
    return launch(2, scenarios, folder / "replays", seconds=300)


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Two stages, each of two replicas, each of these on two tensor-parallel ranks."""
    every = f"{EVERY} {TENSOR} --sequence-parallel {OVERLAPS} --train-iters 3"
    paci = "--pipeline-schedule paci"
    scenarios = {
        "stock": {"arguments": flags(2, every), "plugin": False},
        "paci": {"arguments": flags(2, f"{every} {paci}")},
        "stream": {"arguments": flags(2, f"{every} --eval-interval 100 {paci} --paci-accum 2")},
    }
    return launch(8, scenarios, tmp_path_factory.mktemp("eight"), seconds=400)


def assert_same_training(stock: list[dict], paci: list[dict]) -> None:
    for one, other in zip(stock, paci, strict=True):
        for key in ("losses", "evaluations", "weights", "optimizer", "learning_rate"):
            assert one[key] == other[key]


@pytest.mark.parametrize("name", SETUPS)
def test_4_drained_every_window_equals_1f1b(ranks, name):
    assert_same_training(ranks[f"stock-{name}"], ranks[f"paci-{name}"])


@pytest.mark.parametrize("name", DEFERRED)
def test_4_drained_every_window_a_deferred_step_equals_1f1b(ranks, name):
    assert_same_training(ranks[f"stock-{name}"], ranks[f"deferred-paci-{name}"])


@pytest.mark.parametrize(
    "kind, name",
    [("", name) for name in REPLAYED] + [("deferred-", n) for n in DEFERRED if n in REPLAYED],
)
def test_5_a_stream_equals_its_replay(ranks, replays, kind, name):
    found, replayed = ranks[f"{kind}stream-{name}"], replays[f"{kind}{name}"]
    assert [rank["losses"] for rank in found[2:]] == [replay["losses"] for replay in replayed]
    assert len(found[2]["losses"]) == 4
    for stage in (0, 1):
        stream = [rank["weights"] for rank in found[2 * stage : 2 * stage + 2]]
        assert stream == [replay["weights"][stage] for replay in replayed]


def test_4_drained_every_window_equals_1f1b_with_all_at_once(eight):
    assert_same_training(eight["stock"], eight["paci"])


def test_replicas_stay_equal_with_all_at_once(eight):
    weights = [rank["weights"] for rank in eight["stream"]]
    # By rank: stage, replica, tensor-parallel rank, the last changing fastest.
    for stage in (weights[:4], weights[4:]):
        assert stage[:2] == stage[2:]
    assert len(set(weights)) == 4


@pytest.mark.parametrize("name", [name for name in SETUPS if not name.startswith(("tp", "sp"))])
def test_replicas_stay_equal_while_the_stream_runs(ranks, name):
    first, copy, last, last_copy = ranks[f"stream-{name}"]
    assert first["weights"] == copy["weights"] != last["weights"] == last_copy["weights"]
    assert last["losses"] == last_copy["losses"]


@pytest.mark.parametrize("one, other", SAME)
def test_overlapping_communication_changes_no_number(ranks, one, other):
    for first, second in zip(ranks[one], ranks[other], strict=True):
        assert first["losses"] == second["losses"] and first["weights"] == second["weights"]


def test_sharding_the_optimizer_changes_next_to_nothing(ranks):
    """Not bitwise: Megatron itself sums gradients in another order then."""
    for first, second in zip(ranks["stream-dp"][2]["losses"], ranks["stream-sharded"][2]["losses"]):
        assert first["lm loss"] == pytest.approx(second["lm loss"], rel=1e-5)


def test_7_two_runs_are_equal_whatever_the_timing(ranks):
    for first, second in zip(ranks["again"], ranks["stream-sharded-overlaps"], strict=True):
        assert (first["losses"], first["weights"]) == (second["losses"], second["weights"])


def test_context_parallel_attention_is_that_of_one_rank(ranks):
    """Up to rounding of float64: the gradients of keys and values are summed rank by rank."""
    for rank in ranks["attention"]:
        assert len(rank) == 10
        for case, found in rank.items():
            assert max(found.values()) < 1e-14, case


def test_context_parallel_trains_like_data_parallel(ranks):
    """The same samples, so the same losses and gradients up to the order of sums in fp32."""
    for one, other in zip(ranks["stock-dp"], ranks["stock-cp"], strict=True):
        assert one["grad_norms"] == pytest.approx(other["grad_norms"], rel=1e-6)
        for first, second in zip(one["losses"], other["losses"], strict=True):
            assert first == pytest.approx(second, rel=1e-6)
