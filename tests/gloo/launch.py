"""Starts the scenarios of a distributed test (worker.py) on local processes.

One launch runs several scenarios, and the launches of a test file share their processes (pool.py),
which are forked from one that has imported Megatron (forked.py): that costs seconds. When the time
is up every rank prints what it was doing last and where, then all of them are killed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from megatron_paci.bench.ranks import RankError
from megatron_paci.bench.results import job_result
from megatron_paci.bench.virtual import VirtualRun
from tests.gloo.pool import RankPool

__all__ = ["RankError", "TINY_GPT", "end_shared_ranks", "flags", "launch", "measured"]

TINY_GPT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 255 --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --train-iters 4 --lr 1e-2 "
    "--lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 --eval-iters 2 "
    "--eval-interval 1000 --rerun-mode disabled --seed 1"
)
_shared: RankPool | None = None


def flags(num_stages: int, extra: str = "", base: str = TINY_GPT) -> list[str]:
    """Return the command line of a tiny GPT; a flag in ``extra`` comes after, so it wins."""
    return f"{base} --pipeline-model-parallel-size {num_stages} {extra}".split()


def launch(
    num_ranks: int,
    scenarios: dict[str, dict],
    folder: Path,
    *,
    seconds: float,
    fresh: bool = False,
) -> dict[str, list[dict]]:
    """Run ``scenarios`` one after another on ``num_ranks`` processes.

    Args:
        scenarios: Name to the parameters of ``worker.run_scenario``.
        folder: Receives the output of fresh processes.
        seconds: Limit for the whole launch, times the environment's TEST_TIME_FACTOR (a number,
            for slow or busy machines).
        fresh: Start processes for this launch alone, for what is meant to fail or changes them.

    Returns:
        Name to one result per rank, in rank order.

    Raises:
        RankError: A rank failed or the time is up. All processes are gone then.
    """
    seconds *= float(os.environ.get("TEST_TIME_FACTOR", "1"))
    if not fresh:
        return shared_ranks().run(num_ranks, scenarios, seconds=seconds)
    pool = RankPool(folder)
    try:
        return pool.run(num_ranks, scenarios, seconds=seconds)
    finally:
        pool.close()


def measured(
    runs: dict[str, VirtualRun], folder: Path, *, seconds: float
) -> dict[str, dict[str, Any]]:
    """Do what ``bench.virtual.measure`` does, on the shared processes; return results by name."""
    [num_ranks] = {run.num_ranks for run in runs.values()}
    plans = {name: run.for_ranks(folder / name) for name, run in runs.items()}
    found = launch(num_ranks, plans, folder, seconds=seconds)
    return {name: job_result(ranks) for name, ranks in found.items()}


def shared_ranks() -> RankPool:
    """Return the processes that the launches of a test file share."""
    global _shared
    if _shared is None:
        _shared = RankPool(Path(tempfile.mkdtemp(prefix="megatron_paci-")))
    return _shared


def end_shared_ranks() -> None:
    """End the shared processes and remove what they have written."""
    global _shared
    if _shared is not None:
        _shared.close()
        shutil.rmtree(_shared.folder)
        _shared = None
