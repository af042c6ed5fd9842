"""The whole training loop in virtual time: nothing makes a stage wait for another one.

Everything that Megatron logs is on; the tool (megatron_paci/bench) finds collectives over several
stages by itself and names their call sites.
"""

from __future__ import annotations

import pytest

from megatron_paci.bench.virtual import VirtualRun
from tests.gloo.launch import flags, launch, measured

LOGGING = (
    "--clip-grad 1.0 --log-throughput --log-memory-to-tensorboard --log-timers-to-tensorboard "
    "--timing-log-level 2 --log-num-zeros-in-grad --log-validation-ppl-to-tensorboard "
    "--log-world-size-to-tensorboard --exit-signal-handler "
    "--exit-duration-in-mins 1000 --manual-gc"
)


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-router-load-balancing-type "
    "aux_loss --moe-aux-loss-coeff 1e-2"
)
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


def run(stages: int, microbatches: int, **parameters) -> VirtualRun:
    defaults = {
        "accum": microbatches, "iterations": 10, "tied_embeddings": True, "megatron_args": LOGGING,
    }
    return VirtualRun(
        stages=stages, microbatches=microbatches, schedule="paci", **defaults | parameters
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    runs = {
        "m1": run(2, 1), "m4": run(2, 4), "m4a1": run(2, 4, accum=1),
        "per-token": run(2, 4, megatron_args=f"{LOGGING} --calculate-per-token-loss"),
        "local": run(2, 4, megatron_args=f"{LOGGING} --paci-clip local"),
        "bf16": run(2, 4, megatron_args=f"{LOGGING} --bf16"),
        "fp16": run(2, 4, megatron_args=f"{LOGGING} --fp16 --initial-loss-scale 1024"),
        "experts": run(2, 4, megatron_args=f"{LOGGING} {EXPERTS}"),
        "latency": run(2, 4, latency="1/20"),
        "deferred": run(
            2, 4, accum=2, megatron_args=f"{LOGGING} --paci-defer-step", extra_in_flight=1,
            latency="1/10",
        ),
    }
    return measured(runs, tmp_path_factory.mktemp("two"), seconds=400)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    runs = {"m2": run(4, 2), "m4": run(4, 4), "m8a2": run(4, 8, accum=2)}
    return measured(runs, tmp_path_factory.mktemp("four"), seconds=400)


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Eight ranks: as many stages, or four stages of two ranks each."""
    runs = {
        "m1": run(8, 1), "m8": run(8, 8),
        "dp": run(4, 4, replicas=2),
        "dp-a2": run(4, 4, replicas=2, accum=2),
        "tp": run(4, 4, tensor=2),
        "sharded": run(
            4, 4, replicas=2, megatron_args=f"{LOGGING} {SHARDED}"
        ),
    }
    return measured(runs, tmp_path_factory.mktemp("eight"), seconds=600)


TWO = ("m1", "m4", "m4a1", "per-token", "local", "bf16", "fp16", "experts", "deferred")
ALL = [("two", name) for name in TWO]
ALL += [("four", name) for name in ("m2", "m4", "m8a2")]
ALL += [("eight", name) for name in ("m1", "m8", "dp", "dp-a2", "tp", "sharded")]


@pytest.mark.parametrize("ranks, name", ALL)
def test_3_no_collective_over_stages_and_no_bubble(ranks, name, request):
    result = request.getfixturevalue(ranks)[name]
    assert result["cross_stage_collectives"] == 0, result["call_sites"]
    assert min(result["utilization"]) >= 0.995


def test_latency_costs_what_the_round_trip_takes(two):
    """Two microbatches per round trip of 2 x 3 units and two messages of 1/20."""
    assert min(two["latency"]["utilization"]) == pytest.approx(6 / 6.1, abs=1e-3)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """Two replicas of a pipeline of two stages."""
    every = "--eval-interval 1 --eval-iters 1 --clip-grad 0"
    command = flags(2, every)
    paci = "--pipeline-schedule paci"
    scenarios = {
        "stock": {"arguments": command, "plugin": False},
        "paci": {"arguments": [*command, *paci.split()]},
        "stream": {"arguments": flags(2, f"{paci} --paci-accum 2")},
        "again": {"arguments": flags(2, f"{paci} --paci-accum 2"), "sleep_ms": 5},
        "signal": {
            "arguments": flags(2, f"{paci} --paci-accum 2 --train-iters 30 --exit-signal-handler"),
            "stop": {"iteration": 3, "rank": 3, "how": "signal"},
        },
    }
    return launch(4, scenarios, tmp_path_factory.mktemp("replicas"), seconds=300)


def test_two_replicas_drained_equal_1f1b(replicas):
    for stock, paci in zip(replicas["stock"], replicas["paci"]):
        for key in ("losses", "evaluations", "weights", "optimizer"):
            assert paci[key] == stock[key]


def test_replicas_stay_equal_while_the_stream_runs(replicas):
    for name in ("stream", "again"):
        ranks = replicas[name]  # ranks 0 and 1 are the first stage
        assert ranks[0]["weights"] == ranks[1]["weights"] != ranks[2]["weights"]
        assert ranks[2]["weights"] == ranks[3]["weights"]
        assert ranks[2]["losses"] == ranks[3]["losses"]
    assert replicas["again"][0]["weights"] == replicas["stream"][0]["weights"]


def test_a_signal_to_one_replica_ends_both(replicas):
    iterations = {len(rank["losses"]) for rank in replicas["signal"]}
    assert len(iterations) == 1 and 4 <= iterations.pop() <= 6
