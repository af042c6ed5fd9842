"""Starts the ranks of a benchmark on this machine, and never leaves one behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_paci.children import python_path


class RankError(RuntimeError):
    """A rank failed, or the time was up; the message holds the end of every rank's output."""


RANK_PROGRAM = ("-m", "megatron_paci.bench.rank")


def run_ranks(
    num_ranks: int,
    runs: list[dict[str, Any]],
    folder: Path,
    *,
    seconds: float,
    program: Sequence[str] = RANK_PROGRAM,
) -> list[list[dict[str, Any]]]:
    """Do ``runs`` one after another on ``num_ranks`` processes: importing Megatron costs seconds.

    Args:
        runs: As ``program`` takes them, without the port.
        folder: Receives outputs and results.
        seconds: Limit for all of it.
        program: Arguments of the interpreter, ``folder`` comes last. It reads ``runs.json`` there
            and writes ``<number of the run>.rank<r>.json``.

    Returns:
        For each run one result per rank.

    Raises:
        RankError: A rank failed or the time is up. All processes are gone then, as also after any
            other exception, such as that of Ctrl-C.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stores = meeting_points(len(runs))
    (folder / "runs.json").write_text(
        json.dumps([{**run, "port": store.port} for run, store in zip(runs, stores)])
    )
    ranks: list[subprocess.Popen] = []
    try:
        for rank in range(num_ranks):
            ranks.append(start(rank, num_ranks, folder, program))
        # A bar on a terminal: a run may take minutes.
        with tqdm(total=len(runs), unit="run", disable=None, dynamic_ncols=True) as bar:
            _wait(ranks, folder, seconds, bar)
    finally:
        kill(ranks)
    return [
        [json.loads((folder / f"{n}.rank{r}.json").read_text()) for r in range(num_ranks)]
        for n in range(len(runs))
    ]


def meeting_points(count: int) -> list[Any]:
    """Return stores at which the ranks of a run meet, one per run, held open by this process.

    A port that was only looked up may be somebody else's by the time its run starts.
    """
    import torch.distributed  # here, since the command line has to be quick without it

    return [
        torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for _ in range(count)
    ]


def start(
    rank: int, num_ranks: int, folder: Path, program: Sequence[str]
) -> subprocess.Popen:
    """Start one rank; its output goes to a file in ``folder``, its input stays open until killed.

    Args:
        program: Arguments of the interpreter, ``folder`` comes last.
    """
    with _log(folder, rank).open("w") as log:
        return subprocess.Popen(
            [sys.executable, *program, str(folder)],
            env=environment(rank, num_ranks), stdin=subprocess.PIPE, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )


def environment(rank: int, num_ranks: int) -> dict[str, str]:
    """Return the environment of a rank on this machine: that of this process, and its own."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "localhost",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already
        "OMP_NUM_THREADS": "1",  # ranks share the cores
        "PYTHONPATH": python_path(),
    }


def kill(ranks: Sequence[subprocess.Popen]) -> None:
    """End ranks and whatever they have started; none is left when this returns."""
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with contextlib.suppress(BrokenPipeError):  # what it never read
            process.stdin.close()


def failure(reason: str, ranks: Sequence[subprocess.Popen], folder: Path) -> RankError:
    """Return an error that shows how every rank ended and the end of its output."""
    codes = [process.poll() for process in ranks]
    return RankError(
        f"{reason}; exit statuses {codes} (None, -15 or 143: had to be ended)\n"
        + "\n".join(
            f"--- end of the output of rank {rank}\n{_tail(_log(folder, rank))}"
            for rank in range(len(ranks))
        )
    )


def _wait(ranks: list[subprocess.Popen], folder: Path, seconds: float, bar: tqdm) -> None:
    end = time.monotonic() + seconds
    late = False
    while any(process.poll() is None for process in ranks):
        if (folder / f"{bar.n}.rank0.json").exists():
            bar.update()
        if any(process.poll() not in (None, 0) for process in ranks):
            time.sleep(1)  # let the others say what they saw of it
            break
        if late := time.monotonic() > end:
            # Let them say where they are (rank.py), and what PACI did last there (watchdog.py).
            for number in (signal.SIGUSR1, signal.SIGTERM):
                for process in ranks:
                    process.send_signal(number)
                time.sleep(1)
            break
        time.sleep(0.05)
    if any(process.poll() != 0 for process in ranks):
        raise failure(f"no end after {seconds:g} s" if late else "a rank failed", ranks, folder)


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def _tail(path: Path, lines: int = 60) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
