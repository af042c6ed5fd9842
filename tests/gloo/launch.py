"""Starts the scenarios of a distributed test (worker.py) on local processes.

One launch runs several scenarios, since importing Megatron costs seconds. When the time is up every
rank prints what it was doing last and where, then all of them are killed.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_paci.bench.ranks import RankError, run_ranks

__all__ = ["RankError", "TINY_GPT", "flags", "launch"]

TINY_GPT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 255 --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --train-iters 4 --lr 1e-2 "
    "--lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 --eval-iters 2 "
    "--eval-interval 1000 --rerun-mode disabled --seed 1"
)
WORKER = Path(__file__).with_name("worker.py")


def flags(num_stages: int, extra: str = "", base: str = TINY_GPT) -> list[str]:
    """Return the command line of a tiny GPT; a flag in ``extra`` comes after, so it wins."""
    return f"{base} --pipeline-model-parallel-size {num_stages} {extra}".split()


def launch(
    num_ranks: int, scenarios: dict[str, dict], folder: Path, *, seconds: float
) -> dict[str, list[dict]]:
    """Run ``scenarios`` one after another on ``num_ranks`` processes.

    Args:
        scenarios: Name to the parameters of ``worker.run_scenario``.
        folder: Receives outputs and results.
        seconds: Limit for the whole launch, times the environment's TEST_TIME_FACTOR (a number,
            for slow or busy machines).

    Returns:
        Name to one result per rank, in rank order.

    Raises:
        RankError: A rank failed or the time is up. All processes are gone then.
    """
    seconds *= float(os.environ.get("TEST_TIME_FACTOR", "1"))
    runs = [{"name": name, "seconds": seconds, **each} for name, each in scenarios.items()]
    # The workers speak up by themselves, a little before they would be killed.
    results = run_ranks(num_ranks, runs, folder, seconds=seconds + 10, program=[str(WORKER)])
    return dict(zip(scenarios, results))
