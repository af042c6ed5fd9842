"""Exact oracles in real Megatron training: every comparison is to the last bit.

The numbers in the names are those of the invariants in docs/design.md.
"""

from __future__ import annotations

import pytest

from megatron_paci.bench import memory
from megatron_paci.schedule import StageSchedule
from tests.gloo.launch import flags, launch
from tests.gloo.scenarios import EVERY, drained_pair, replay_of, variant_flags

ITERATIONS = 4
MEMORY = memory.MemoryRun()
PACI = "--clip-grad 0 --pipeline-schedule paci"
VARIANTS = {
    "plain": "",
    "bf16": "--bf16",
    "dropout": "--attention-dropout 0.1 --hidden-dropout 0.1 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1",
    "sgd": "--optimizer sgd --position-embedding-type rope --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --normalization RMSNorm",
}
STREAMS = {
    # name: (number of stages, global batch, accumulation, more in flight per link, deferred step);
    # microbatches are of two sequences
    f"n{n}m{m}a{a}" + f"s{s}" * (s > 0) + "d" * deferred: (n, 2 * m, a, s, deferred)
    for n, m, a, s, deferred in [
        *((n, m, a, 0, False) for n, m, a in [
            (2, 8, 1), (2, 8, 2), (2, 8, 8), (2, 1, 1), (4, 8, 1), (4, 8, 2), (4, 8, 8),
            (4, 2, 1), (4, 2, 2), (4, 3, 3)
        ]),
        (2, 2, 1, 1, False), (4, 8, 2, 2, False), (4, 6, 6, 1, False),
        (2, 8, 1, 0, True), (4, 8, 4, 0, True), (4, 6, 2, 1, True),
    ]
}
# Drained after every window these make no difference.
VARIATIONS = {"s1": (1, False), "s2": (2, False), "deferred": (0, True), "s1-deferred": (1, True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("oracles")


def drained_pairs(num_stages: int, variants: dict[str, str]) -> dict[str, dict]:
    scenarios = {}
    for name, variant in variants.items():
        scenarios |= drained_pair(name, num_stages, variant)
    return scenarios


def streams(num_stages: int, folder) -> dict[str, dict]:
    return {
        name: {
            "arguments": flags(
                n, f"{PACI} --paci-accum {a} --global-batch-size {batch} {variant_flags(*variant)}"
            ),
            "save_initial": str(folder / name),
        }
        for name, (n, batch, a, *variant) in STREAMS.items()
        if n == num_stages
    }


def variations(num_stages: int) -> dict[str, dict]:
    """Return drained runs that are compared with ``stock-plain``."""
    paci = f"{EVERY} --pipeline-schedule paci"
    return {
        f"paci-{name}": {"arguments": flags(num_stages, f"{paci} {variant_flags(*variant)}")}
        for name, variant in VARIATIONS.items()
    }


@pytest.fixture(scope="module")
def two(folder):
    scenarios = drained_pairs(2, VARIANTS) | streams(2, folder) | variations(2)
    scenarios["off"] = {"arguments": flags(2, EVERY)}
    scenarios["1f1b"] = {"arguments": flags(2, f"{EVERY} --pipeline-schedule 1f1b")}
    scenarios["again"] = {**scenarios["n2m8a2"], "save_initial": None, "sleep_ms": 5}
    scenarios["long"] = {
        "arguments": flags(2, "--pipeline-schedule paci --paci-accum 2 --train-iters 24 --lr 1e-3")
    }
    return launch(2, scenarios, folder / "two", seconds=240)


@pytest.fixture(scope="module")
def four(folder):
    variants = {"plain": "", "uneven": "--num-layers 6 --decoder-first-pipeline-num-layers 1 "
                                       "--decoder-last-pipeline-num-layers 1"}
    scenarios = (
        drained_pairs(4, variants) | streams(4, folder) | variations(4) | counted(folder)
    )
    return launch(4, scenarios, folder / "four", seconds=300)


def counted(folder) -> dict[str, dict]:
    """Return the two runs of ``bench memory``, which leave what they count in folders."""
    scenarios = {}
    for schedule in memory.SCHEDULES:
        (folder / schedule).mkdir()
        run = MEMORY.run(schedule, folder / schedule)
        scenarios[schedule] = {"script": memory.SCRIPT, "arguments": run.arguments(folder)}
    return scenarios


@pytest.fixture(scope="module")
def one(folder, two, four):
    """Runs in one process: N = 1, and the replays of the streams above."""
    quarter = "--global-batch-size 4 --train-iters 16 --lr-decay-iters 16"
    scenarios = {
        "stock": {"arguments": flags(1), "plugin": False},
        "paci": {"arguments": flags(1, "--pipeline-schedule paci")},
        "stock-quarter": {"arguments": flags(1, quarter), "plugin": False},
        "paci-quarter": {"arguments": flags(1, "--pipeline-schedule paci --paci-accum 2")},
    }
    for name, (n, batch, a, extra, deferred) in STREAMS.items():
        scenarios[name] = replay_of(
            folder / name, f"--clip-grad 0 --global-batch-size {batch}",
            num_stages=n, accumulation=a, extra_in_flight=extra, defer_step=deferred,
        )
    return launch(1, scenarios, folder / "one", seconds=240)


def outcome(ranks: list[dict]) -> list:
    """Return all that has to be equal: losses, evaluations, weights, optimizer, learning rate."""
    names = ("losses", "evaluations", "weights", "optimizer", "learning_rate")
    return [[rank[name] for name in names] for rank in ranks]


def test_9_installed_but_off_equals_stock(two):
    assert outcome(two["off"]) == outcome(two["stock-plain"])
    assert outcome(two["1f1b"]) == outcome(two["stock-plain"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_4_drained_every_window_equals_1f1b_on_two_stages(two, variant):
    assert len(two[f"stock-{variant}"][1]["losses"]) == ITERATIONS
    assert outcome(two[f"paci-{variant}"]) == outcome(two[f"stock-{variant}"])
    assert "actions" in two[f"paci-{variant}"][0] and two[f"paci-{variant}"][0]["actions"]


@pytest.mark.parametrize("variant", ["plain", "uneven"])
def test_4_drained_every_window_equals_1f1b_on_four_stages(four, variant):
    assert outcome(four[f"paci-{variant}"]) == outcome(four[f"stock-{variant}"])
    assert four[f"paci-{variant}"][3]["statistics"]["updates"] == ITERATIONS


@pytest.mark.parametrize("variation", VARIATIONS)
def test_4_drained_every_window_more_in_flight_and_a_deferred_step_change_nothing(
    two, four, variation
):
    for runs in (two, four):
        assert outcome(runs[f"paci-{variation}"]) == outcome(runs["stock-plain"])


@pytest.mark.parametrize("name", STREAMS)
def test_5_a_replay_in_one_process_equals_the_distributed_run(two, four, one, name):
    ranks, replay = (two | four)[name], one[name][0]
    assert len(replay["losses"]) == ITERATIONS
    assert ranks[-1]["losses"] == replay["losses"]
    assert [rank["weights"] for rank in ranks] == replay["weights"]
    assert [rank["optimizer"] for rank in ranks] == replay["optimizer"]


@pytest.mark.parametrize("name", STREAMS)
def test_1_2_actions_drift_and_queue_are_those_of_the_schedule(two, four, name):
    num_stages, batch, accumulation, extra, deferred = STREAMS[name]
    total = batch // 2 * ITERATIONS
    for stage, rank in enumerate((two | four)[name]):
        schedule = StageSchedule(stage, num_stages, accumulation, extra, deferred)
        assert rank["actions"] == [str(action) for action in schedule.finite(total)]
        drifts = [schedule.drift(j) for j in range(total)]
        statistics = rank["statistics"]
        assert statistics["drift_counts"] == {str(d): drifts.count(d) for d in sorted(set(drifts))}
        assert statistics["drift_max"] <= schedule.drift_bound
        depth = num_stages - stage + extra * (num_stages - 1 - stage)
        assert statistics["in_flight_max"] == min(depth, total)


def test_2_no_copy_of_the_weights_is_kept(two):
    """What is alive after training differs by less than three messages of the pipeline."""
    message = 32 * 2 * 64 * 4  # sequence, microbatch, hidden, bytes; the weights are 30 times that
    for stock, paci in zip(two["stock-plain"], two["n2m8a1"]):
        assert abs(paci["bytes"] - stock["bytes"]) < 3 * message


def test_2_memory_is_that_of_1f1b_on_every_stage(four, folder):
    """Parameters, gradients, optimizer state and activations to the byte; one more message each."""
    result = memory.compare(
        MEMORY, {schedule: memory.stages_of(folder / schedule) for schedule in memory.SCHEDULES}
    )
    assert result["weights_ratio"] == [1, 1, 1, 1]
    assert result["activations_ratio"] == [1, 1, 1, 1]


def test_6_one_stage_equals_gradient_accumulation(one):
    assert outcome(one["paci"]) == outcome(one["stock"])
    quarter, stock = one["paci-quarter"][0], one["stock-quarter"][0]
    for name in ("weights", "optimizer", "learning_rate"):
        assert quarter[name] == stock[name]
    assert len(stock["losses"]) == 4 * ITERATIONS  # the same updates, in iterations of one window


def test_7_two_runs_are_equal_whatever_the_timing(two):
    assert outcome(two["again"]) == outcome(two["n2m8a2"])
    assert two["again"][0]["actions"] == two["n2m8a2"][0]["actions"]


def test_delay_changes_the_numbers(two, four):
    """Guards the oracles: a stream that was drained all the time would pass them, too."""
    assert two["n2m8a1d"][1]["weights"] != two["n2m8a1"][1]["weights"]
    assert four["n4m8a2s2"][0]["weights"] != four["n4m8a2"][0]["weights"]
    assert two["n2m8a8"][1]["losses"][0] == two["paci-plain"][1]["losses"][0]
    assert two["n2m8a8"][1]["losses"][1:] != two["paci-plain"][1]["losses"][1:]


def test_the_loss_falls(two):
    losses = [entry["lm loss"] for entry in two["long"][1]["losses"]]
    assert sum(losses[-4:]) / 4 < losses[0] - 0.5
