"""Flags of Megatron that change how an iteration, a step or a reduction is done, one by one.

Evaluating after every iteration drains after every iteration, and clipping is off: PACI then has to
equal Megatron's own schedule to the last bit, with the same flags.
"""

from __future__ import annotations

import pytest

from tests.gloo.launch import TINY_GPT, flags, launch
from tests.gloo.scenarios import drained_pair

BY_SAMPLES = TINY_GPT.replace("--train-iters 4", "--train-samples 64")
GROWING = TINY_GPT.replace("--global-batch-size 16", "")
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce"

TWO_STAGES = {
    # name: (flags, base)
    "layout": ("--pipeline-model-parallel-layout Et|tttL", TINY_GPT),
    "accounted": (
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", TINY_GPT
    ),
    "selective": (f"{DROPOUT} --recompute-granularity selective", TINY_GPT),
    "block": (
        f"{DROPOUT} --recompute-granularity full --recompute-method block --recompute-num-layers 1",
        TINY_GPT,
    ),
    "rates": (
        "--decoupled-lr 2e-2 --decoupled-min-lr 1e-3 --start-weight-decay 0.01 "
        "--end-weight-decay 0.2 --weight-decay-incr-style cosine",
        TINY_GPT,
    ),
    "wsd": ("--lr-decay-style WSD --lr-wsd-decay-iters 2", TINY_GPT),
    "mup": ("--use-mup --mup-base-hidden-size 32", TINY_GPT),
    "no-decay": ("--qk-layernorm --apply-wd-to-qk-layernorm", TINY_GPT),
    "samples": ("", BY_SAMPLES),
    "skipped": ("--iterations-to-skip 2", TINY_GPT),
    "growing": ("--step-batch-size-schedule 0:4,256:8", GROWING),
    "phases": ("--phase-transition-iterations 3", BY_SAMPLES),
}
FOUR_RANKS = {
    # name: (flags, base); two stages, and two replicas if it is not tensor parallel
    "mapping": ("--use-tp-pp-dp-mapping", TINY_GPT),
    "buckets": (f"{SHARDED} --ddp-bucket-size 20000 --no-align-grad-reduce", TINY_GPT),
    "numbered-buckets": (
        f"{SHARDED} --ddp-num-buckets 3 --ddp-pad-buckets-for-high-nccl-busbw", TINY_GPT
    ),
    "average": ("--ddp-average-in-collective", TINY_GPT),
    "bf16": ("--bf16 --grad-reduce-in-bf16", TINY_GPT),
    "bf16-fp32": (
        "--bf16 --grad-reduce-in-bf16 --ddp-param-name-patterns-for-fp32-local-accumulation all",
        TINY_GPT,
    ),
    "fp32-sums": ("--ddp-reduce-scatter-with-fp32-accumulation --bf16 --grad-reduce-in-bf16 "
                  f"{SHARDED}", TINY_GPT),
    "hashes": ("--check-weight-hash-across-dp-replicas-interval 2", TINY_GPT),
    "fewer": (
        "--global-batch-size 18 --decrease-batch-size-if-needed --eval-global-batch-size 16",
        TINY_GPT,
    ),
    "saved-activations": (
        f"--tensor-model-parallel-size 2 {DROPOUT} --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --distribute-saved-activations",
        TINY_GPT,
    ),
}
# These change what happens between iterations: they have to run in a stream that is not drained.
STREAMED = ("skipped", "growing", "phases", "hashes", "fewer")


def run(num_ranks: int, setups: dict, folder) -> dict:
    scenarios = {}
    for name, (extra, base) in setups.items():
        scenarios |= drained_pair(name, 2, extra, base)
        if name in STREAMED:
            stream = flags(2, f"--pipeline-schedule paci --paci-accum 1 {extra}", base)
            scenarios[f"stream-{name}"] = {"arguments": stream}
    return launch(num_ranks, scenarios, folder, seconds=500)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flags")
    return run(2, TWO_STAGES, folder / "two") | run(4, FOUR_RANKS, folder / "four")


@pytest.mark.parametrize("name", [*TWO_STAGES, *FOUR_RANKS])
def test_4_drained_every_window_equals_1f1b(runs, name):
    for stock, paci in zip(runs[f"stock-{name}"], runs[f"paci-{name}"], strict=True):
        assert paci["losses"] == stock["losses"] and paci["evaluations"] == stock["evaluations"]
        if name != "phases":  # leaves the process before its weights can be looked at
            assert paci["weights"] == stock["weights"]
            assert paci["learning_rate"] == stock["learning_rate"]


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_does_the_same_work(runs, name):
    """As many iterations and microbatches as drained, each of them with a step of its own."""
    for drained, stream in zip(runs[f"paci-{name}"], runs[f"stream-{name}"], strict=True):
        assert len(stream["losses"]) == len(drained["losses"])
        assert stream.get("learning_rate") == drained.get("learning_rate")
        forwards, in_drained = (
            sum(action.startswith("F") for action in each["actions"]) for each in (stream, drained)
        )
        assert forwards == in_drained == stream["actions"].count("STEP")
