"""Starts a training run, shows how far it is, and says why it failed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from megatron_paci.children import python_path

ITERATION = re.compile(r"\biteration +(\d+)/ *(\d+) \|.*\blm loss: (\S+)")
LAUNCHER = re.compile(r"^.*torch/distributed/elastic/multiprocessing/api\.py.*$", re.MULTILINE)


class RunError(Exception):
    """A run that failed; the message says how, with the end of its log."""


def train(
    command: Sequence[str],
    *,
    label: str,
    log: Path,
    done: int = 0,
    iterations: int | None = None,
    runs_after: int = 0,
    stall_seconds: float | None = None,
) -> None:
    """Run one training with a progress bar.

    Args:
        command: What to start.
        label: Of the bar.
        log: File for everything that it prints.
        done: Iterations that were done before, as the log counts.
        iterations: How many it does; None for what the log says.
        runs_after: Runs that follow this one; the bar tells the time left for all, taking them to
            last as long.
        stall_seconds: End a run that prints nothing for so long; None for never.

    Raises:
        RunError: It failed, or was ended.
        OSError: It cannot be started, or the log cannot be written.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": python_path()}
    with (
        open(log, "wb") as out,
        open(log, encoding="utf-8", errors="replace") as lines,
        tqdm(desc=label, unit="it", disable=None, dynamic_ncols=True) as bar,
    ):
        bar.set_postfix_str("starting")
        process = subprocess.Popen(
            command, env=environment,
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            started = heard = time.monotonic()
            heard_first, rest = None, ""
            while True:
                ended = process.poll() is not None  # before reading, so that nothing is missed
                text = lines.read()
                if text:
                    heard = time.monotonic()
                *whole, rest = (rest + text).split("\n")
                for number, last, loss in filter(None, map(progress, whole)):
                    iteration, total = number - done, iterations or last - done
                    if not bar.n:
                        # The time left follows from iterations, not from start-up.
                        bar.reset(total=total)
                    heard_first = heard_first or (heard, iteration)
                    seconds = left_for_all(
                        started, heard_first, (heard, iteration), total, runs_after
                    )
                    bar.set_postfix_str(
                        f"loss {loss:.2f}, all runs: {tqdm.format_interval(seconds)} left",
                        refresh=False,
                    )
                    bar.update(iteration - bar.n)
                if ended:
                    break
                if stall_seconds is not None and time.monotonic() - heard > stall_seconds:
                    raise RunError(f"{label} wrote nothing for {stall_seconds:g} s and was "
                                   f"stopped; see {log}")
                time.sleep(0.2)
        finally:
            stop(process)
    if process.returncode:
        text = log.read_text(encoding="utf-8", errors="replace")
        raise RunError(f"{label} failed with exit status {process.returncode}. The end of "
                       f"{log}:\n\n{failure(text)}")


def left_for_all(
    started: float,
    first: tuple[float, int],
    last: tuple[float, int],
    total: int,
    runs_after: int,
) -> float:
    """Return the seconds that this run and those after it will take.

    Args:
        started: Time when the run was started.
        first: Time when the log told of an iteration first, and which one.
        last: The same for the last one.
        total: Iterations in all.
        runs_after: Runs that follow, taken to last as long as this one, start-up included.
    """
    done = last[1] - first[1]
    # So long as there is only one, its share of the start-up is the best that is known.
    per_iteration = (last[0] - first[0]) / done if done else (last[0] - started) / last[1]
    left = per_iteration * (total - last[1])
    return left + runs_after * (last[0] - started + left)


def stop(process: subprocess.Popen) -> None:
    """End a run that still goes on, ranks included."""
    if process.poll() is None:
        # The ranks are in sessions of their own. The launcher takes them along, by force after
        # 30 s, if it is left to: no second Ctrl-C may cut this short.
        before = {number: signal.signal(number, signal.SIG_IGN)
                  for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            process.terminate()
            try:
                process.wait(timeout=45)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def progress(line: str) -> tuple[int, int, float] | None:
    """Return (iteration, iterations in all, loss) of a line of Megatron's log, else None."""
    match = ITERATION.search(line)
    return (int(match[1]), int(match[2]), float(match[3])) if match else None


def failure(log: str, *, num_lines: int = 15) -> str:
    """Return those lines of a failed run's log that say why, as well as one can tell."""
    # What the launcher adds once a rank has failed says only that.
    log = LAUNCHER.split(log)[0]
    if "megatron_paci: error:" in log:
        return log[log.index("megatron_paci: error:"):].strip()
    lines = [line for line in log.splitlines() if line.strip() and "warn" not in line.lower()]
    return "\n".join(lines[-num_lines:]) or "(the log is empty)"
