"""Starts the processes of a distributed test, and never leaves one behind.

One launch runs several scenarios, since importing Megatron costs seconds. Each rank writes a JSON
file per scenario. When the time is up every rank prints what it was doing last and where, then all
of them are killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]

TINY_GPT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 255 --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --train-iters 4 --lr 1e-2 "
    "--lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 --eval-iters 2 "
    "--eval-interval 1000 --rerun-mode disabled --seed 1"
)


def flags(num_stages: int, extra: str = "", base: str = TINY_GPT) -> list[str]:
    """Return the command line of a tiny GPT; a flag in ``extra`` comes after, so it wins."""
    return f"{base} --pipeline-model-parallel-size {num_stages} {extra}".split()


class LaunchError(AssertionError):
    """A rank failed, or the time was up; the message holds the end of every rank's output."""


def launch(
    num_ranks: int, scenarios: dict[str, dict], folder: Path, *, seconds: float
) -> dict[str, list[dict]]:
    """Run ``scenarios`` one after another on ``num_ranks`` processes.

    Args:
        scenarios: Name to what tests/gloo/worker.py takes: ``kind`` and its parameters.
        folder: Receives outputs and results.
        seconds: Limit for the whole launch.

    Returns:
        Name to one result per rank, in rank order.

    Raises:
        LaunchError: A rank failed or the time is up. All processes are gone then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A meeting point per scenario, held open by this process: a port that was only looked up may be
    # somebody else's by the time its scenario starts.
    stores = [
        torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for _ in scenarios
    ]
    numbered = {
        name: scenario | {"port": store.port}
        for (name, scenario), store in zip(scenarios.items(), stores)
    }
    (folder / "scenarios.json").write_text(json.dumps(numbered))
    ranks = []
    try:
        for rank in range(num_ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "localhost",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
                "PACI_TEST_SECONDS": str(seconds),
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            }
            with (folder / f"rank{rank}.log").open("w") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(Path(__file__).with_name("worker.py")), str(folder)],
                        env=environment, stdout=log, stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        _wait(ranks, folder, seconds + 10)  # the workers speak up first, see worker.py
    finally:
        for process in ranks:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    return {
        name: [json.loads((folder / f"{name}.rank{r}.json").read_text()) for r in range(num_ranks)]
        for name in scenarios
    }


def _wait(ranks: list[subprocess.Popen], folder: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in ranks):
        if any(process.poll() not in (None, 0) for process in ranks):
            time.sleep(1)  # let the others say what they saw of it
            break
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    codes = [process.poll() for process in ranks]
    if any(code != 0 for code in codes):
        raise LaunchError(
            f"exit codes {codes} (None: killed when the time was up)\n" + "\n".join(
                f"--- rank {rank}\n{_tail(folder / f'rank{rank}.log')}"
                for rank in range(len(ranks))
            )
        )


def _tail(path: Path, lines: int = 60) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
