"""Mixture of experts and multi-token prediction: losses, gradients and statistics of their own.

Drained runs are compared with Megatron's own 1F1B, streams with the replay (replay.py) or, with a
learning rate that moves nothing, with 1F1B again.
"""

from __future__ import annotations

import pytest

from tests.gloo.launch import TINY_GPT, flags, launch
from tests.gloo.scenarios import TIED, drained_pair, replay_of, variant_flags

FROZEN = "--lr 1e-20 --clip-grad 0"
STREAM = "--pipeline-schedule paci --paci-accum 2"
MOE = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"
LOSSES = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-1"
BIAS = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type none"
)
MTP = "--mtp-num-layers 1 --position-embedding-type rope"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
VARIANTS = {
    "aux-loss": (f"{MOE} {LOSSES} --moe-z-loss-coeff 1e-3", TINY_GPT),
    "sequence-aux-loss": (f"{MOE} {LOSSES.replace('aux_loss', 'seq_aux_loss')}", TINY_GPT),
    "per-token": (f"{MOE} {LOSSES} --calculate-per-token-loss", TINY_GPT),
    "expert-bias": (f"{MOE} {BIAS}", TINY_GPT),
    "some-layers": (f"{MOE} {LOSSES} --moe-layer-freq [0,0,0,1] --bf16", TINY_GPT),
    "mtp": (MTP, TINY_GPT),
    "mtp-tied": (f"{MTP} --bf16", TIED),
    "mtp-moe": (f"{MTP} {MOE} {LOSSES}", TINY_GPT),
}
REPLAYED = ("aux-loss", "expert-bias", "mtp", "mtp-tied", "mtp-moe")
PARALLEL = {
    "ep": (f"{MOE} {LOSSES} --expert-model-parallel-size 2", TINY_GPT),
    "ep-global-aux-loss": (
        f"{MOE} {LOSSES.replace('aux_loss', 'global_aux_loss')} --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall --overlap-grad-reduce", TINY_GPT
    ),
    "ep-bias-sharded": (f"{MOE} {BIAS} --expert-model-parallel-size 2 {SHARDED}", TINY_GPT),
    "mtp-sharded": (f"{MTP} {SHARDED}", TIED),
    "tp-ep": (
        f"{MOE} {LOSSES} --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1", TINY_GPT
    ),
}
PARALLEL_REPLAYED = ("ep", "ep-bias-sharded", "tp-ep")
LOGGED = {
    # Stages without such layers included; the learning rate moves nothing.
    "all": f"{MOE} {LOSSES} --moe-z-loss-coeff 1e-3",
    "last": f"{MOE} {LOSSES} --moe-layer-freq [0,0,0,1]",
    "first": f"{MOE} {LOSSES} --moe-layer-freq [1,0,0,0]",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experts")


def pairs(variants: dict[str, tuple[str, str]]) -> dict[str, dict]:
    scenarios = {}
    for name, (extra, base) in variants.items():
        scenarios |= drained_pair(name, 2, extra, base)
    return scenarios


@pytest.fixture(scope="module")
def two(folder):
    scenarios = pairs(VARIANTS)
    for name in REPLAYED:
        extra, base = VARIANTS[name]
        scenarios[f"stream-{name}"] = {
            "arguments": flags(2, f"{STREAM} --clip-grad 0.5 {extra}", base),
            "save_initial": str(folder / name),
        }
    # Its routers count one more forward before the step.
    deferred = [*scenarios["stream-expert-bias"]["arguments"], *variant_flags(1, True).split()]
    scenarios["stream-expert-bias-deferred"] = {"arguments": deferred}
    return launch(2, scenarios, folder / "two", seconds=400)


@pytest.fixture(scope="module")
def four(folder):
    scenarios = pairs(PARALLEL)
    for name, (extra, base) in PARALLEL.items():
        scenarios[f"stream-{name}"] = {
            "arguments": flags(2, f"{STREAM} {extra}", base),
            "save_initial": str(folder / name) if name in PARALLEL_REPLAYED else None,
        }
    for name, extra in LOGGED.items():
        command = flags(4, f"{FROZEN} {extra}")
        scenarios[f"stock-logged-{name}"] = {"arguments": command, "plugin": False}
        scenarios[f"stream-logged-{name}"] = {"arguments": [*command, *STREAM.split()]}
    scenarios["lazy-links"] = {
        **scenarios["stream-logged-all"], "script": "tests/gloo/lazy_links_gpt.py"
    }
    return launch(4, scenarios, folder / "four", seconds=500)


@pytest.fixture(scope="module")
def one(folder, two):
    scenarios = {}
    for name in REPLAYED:
        extra, base = VARIANTS[name]
        scenarios[name] = replay_of(folder / name, f"--clip-grad 0.5 {extra}", base)
    extra, base = VARIANTS["expert-bias"]
    scenarios["expert-bias-deferred"] = replay_of(
        folder / "expert-bias", f"--clip-grad 0.5 {extra}", base, extra_in_flight=1,
        defer_step=True,
    )
    return launch(1, scenarios, folder / "one", seconds=300)


@pytest.fixture(scope="module")
def replays(folder, four):
    """Each of two processes replays its part of both stages."""
    scenarios = {name: replay_of(folder / name, *PARALLEL[name]) for name in PARALLEL_REPLAYED}
    return launch(2, scenarios, folder / "replays", seconds=300)


@pytest.mark.parametrize("name", [*VARIANTS, *PARALLEL])
def test_4_drained_every_window_equals_1f1b(two, four, name):
    runs = two if name in VARIANTS else four
    for stock, paci in zip(runs[f"stock-{name}"], runs[f"paci-{name}"], strict=True):
        for key in ("losses", "evaluations", "weights", "buffers", "optimizer", "learning_rate"):
            assert paci[key] == stock[key], key
    # What the last stage logs of the routers of all stages.
    assert runs[f"paci-{name}"][-1]["router_metrics"] == (
        runs[f"stock-{name}"][-1]["router_metrics"]
    )


@pytest.mark.parametrize("name", [*REPLAYED, "expert-bias-deferred"])
def test_5_a_stream_equals_its_replay(two, one, name):
    ranks, replay = two[f"stream-{name}"], one[name][0]
    assert ranks[-1]["losses"] == replay["losses"] and len(replay["losses"]) == 4
    for key in ("weights", "buffers"):
        assert [rank[key] for rank in ranks] == replay[key]


@pytest.mark.parametrize("name", PARALLEL_REPLAYED)
def test_5_a_parallel_stream_equals_its_replay(four, replays, name):
    found, replayed = four[f"stream-{name}"], replays[name]
    assert [rank["losses"] for rank in found[2:]] == [replay["losses"] for replay in replayed]
    for stage in (0, 1):
        for key in ("weights", "buffers"):
            stream = [rank[key] for rank in found[2 * stage : 2 * stage + 2]]
            assert stream == [replay[key][stage] for replay in replayed]


@pytest.mark.parametrize("name", [name for name in PARALLEL if not name.startswith("tp")])
def test_what_replicas_share_stays_equal_while_the_stream_runs(four, name):
    first, copy, last, last_copy = four[f"stream-{name}"]
    assert last["losses"] == last_copy["losses"]
    same = first["weights"] == copy["weights"] and last["weights"] == last_copy["weights"]
    assert same == ("ep" not in name)  # experts differ
    assert (first["buffers"], last["buffers"]) == (copy["buffers"], last_copy["buffers"])


@pytest.mark.parametrize("name", LOGGED)
def test_the_logged_auxiliary_losses_of_a_stream_are_those_of_1f1b(four, name):
    stock, stream = four[f"stock-logged-{name}"], four[f"stream-logged-{name}"]
    assert stream[-1]["losses"] == stock[-1]["losses"]
    assert stream[-1]["router_metrics"] == stock[-1]["router_metrics"]
    assert all(entry["load_balancing_loss"] > 0 for entry in stock[-1]["router_metrics"])
    assert len(stream[-1]["router_metrics"]) == 4


def test_links_that_connect_with_their_first_message_change_nothing(four):
    """As under NCCL: two neighbours must not wait for each other's first message."""
    assert len(four["lazy-links"][-1]["losses"]) == 4
    for lazy, stream in zip(four["lazy-links"], four["stream-logged-all"], strict=True):
        for key in ("losses", "router_metrics", "weights"):
            assert lazy[key] == stream[key]


def test_the_auxiliary_losses_reach_the_gradients(two):
    """Guards the oracles: without them the weights would be others."""
    weights = {name: two[f"stock-{name}"][0]["weights"] for name in VARIANTS}
    assert len(set(weights.values())) == len(weights)
