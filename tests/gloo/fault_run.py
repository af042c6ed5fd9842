"""Starts a job with torchrun, as users do, lets a fault happen and sees what becomes of the job.

What is checked is the same for every fault (``Observed.check``): the ranks end or go on as they
should, each says what it was doing, no process is left, what was saved before is untouched, and the
job that goes on or is started again ends with the weights and the optimizer state of one that was
never disturbed, bitwise.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_paci.children import python_path
from tests.gloo.faults import ATTEMPT, Ending, Fault, command_line

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "tests/gloo/faulty_gpt.py"
MARK = "MEGATRON_PACI_FAULT"  # in the environment of every process of a job
STATE = (
    r"rank {rank} \(pipeline of ranks [\d ]+\), iteration \d+ since the start, [a-z ]+; PACI stage "
    r"{rank} of {stages}, accumulation \d+: in action (none|[FB]\d+|STEP), version \d+, in flight "
    r"\[[^]]*\] of at most \d+, last actions \w"
)


class FaultError(AssertionError):
    """Something did not happen as it should; the message holds the end of every output."""


class Job:
    """One torchrun and all it has started."""

    def __init__(self, fault: Fault, folder: Path, plan: dict):
        """Start it; outputs go to ``folder/logs``, checkpoints to ``folder/saved``."""
        self.fault = fault
        self.folder = folder
        self._mark = f"{folder}/{time.time_ns()}"
        self._logs = folder / f"logs.{time.time_ns()}"
        environment = os.environ | {
            MARK: self._mark,
            "FAULT": json.dumps({"folder": str(folder), **plan}),
            "OMP_NUM_THREADS": "1",
            # Else a restarted attempt can meet the addresses of the one before in the store
            # (pytorch issue 135712).
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PYTHONPATH": python_path(),
        }
        with (folder / "torchrun.log").open("a") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "torch.distributed.run", "--standalone",
                    "--nproc-per-node", str(fault.stages), "--max-restarts", str(fault.restarts),
                    "--redirects", "3", "--log-dir", str(self._logs),
                    "-m", "megatron_paci", "run", "--device", "cpu", SCRIPT,
                    *command_line(fault, folder),
                ],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )

    def processes(self, attempt: int | None = None) -> list[int]:
        """Return the processes of this job that live, workers of one attempt alone if given.

        Without those that the fault is known to leave.
        """
        wanted = [f"{MARK}={self._mark}"]
        if attempt is not None:
            wanted.append(f"{ATTEMPT}={attempt}")
        return [
            process for process, environment in environments()
            if all(each in environment for each in wanted)
            and not (self.fault.leaves and self.fault.leaves in command_of(process))
        ]

    def output(self, attempt: int, rank: int) -> str:
        """Return what a rank has written to both of its outputs."""
        files = sorted(self._logs.glob(f"*/attempt_{attempt}/{rank}/std*.log"))
        return "".join(file.read_text(errors="replace") for file in files)

    def kill(self) -> None:
        """End whatever is left."""
        self.fault = replace(self.fault, leaves="")
        for process in self.processes():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def environments() -> Iterator[tuple[int, list[str]]]:
    """Yield the processes of this machine that live, with their environments."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:  # one that has ended and was not waited for has an empty environment
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            yield int(entry.name), environment.decode(errors="replace").split("\0")


def command_of(process: int) -> str:
    """Return the command line of a process, nothing if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def saved_files(folder: Path) -> dict[str, str]:
    """Return the hashes of the files of all complete checkpoints: up to the one in the tracker."""
    last = last_saved(folder)
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for iteration in sorted(folder.glob("saved/iter_*"))
        if int(iteration.name.removeprefix("iter_")) <= last
        for file in sorted(iteration.rglob("*")) if file.is_file()
    }


def last_saved(folder: Path) -> int:
    """Return the iteration of the checkpoint that would be loaded, 0 if there is none."""
    tracker = folder / "saved/latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def final_states(fault: Fault, folder: Path) -> list[dict]:
    """Return what the ranks have ended training with; that is forgotten then."""
    states = []
    for rank in range(fault.stages):
        file = folder / f"final.{rank}.json"
        states.append(json.loads(file.read_text()) if file.exists() else None)
        file.unlink(missing_ok=True)
    return states


class Observed:
    """What became of a job that met a fault.

    Attributes:
        seconds: From the fault until all ranks had ended, from the start if that fails; None if
            they went on.
        lost: Complete iterations that have to be done again; None if they went on.
        status: Exit status of torchrun.
        longest: Seconds until the last process of the job had ended after torchrun had.
    """

    def __init__(self, fault: Fault, folder: Path, *, limit: float):
        """Let it happen. ``limit`` is in seconds, for one job."""
        self.fault, self.folder = fault, folder
        self.seconds: float | None = None
        self.lost: int | None = None
        folder.mkdir(parents=True)
        if fault.first is not None:
            run_undisturbed(fault, folder, fault.first, limit=limit)
        if fault.prepare:
            fault.prepare(folder)
        self.before = saved_files(folder)
        self.job = Job(fault, folder, fault.plan)
        try:
            self._observe(limit)
        finally:
            self.job.kill()
        self.finals = final_states(fault, folder)
        if fault.ending in (Ending.STOPS, Ending.SAVES):
            if fault.ending is Ending.SAVES:
                self.reached = last_saved(folder)
            self.finals = run_undisturbed(fault, folder, fault.again, limit=limit)

    def _observe(self, limit: float) -> None:
        fault, job, end = self.fault, self.job, time.monotonic() + limit
        began, moment = time.time(), self.folder / "fault.json"

        def wait(condition, what: str) -> None:
            while not condition():
                if time.monotonic() > end:
                    raise self.error(f"no end of: {what}")
                time.sleep(0.02)

        wait(lambda: moment.exists() or job.process.poll() is not None, "running up to the fault")
        if moment.exists():
            self.before = saved_files(self.folder)
            if fault.outside:
                fault.outside(job.process.pid)
            began = json.loads(moment.read_text())["time"]
            ranks = job.processes(attempt=0)
            if fault.ending is not Ending.GOES_ON:
                wait(lambda: not alive(ranks), "the ranks of the first attempt")
                self.seconds = time.time() - began
                if fault.afterwards:
                    fault.afterwards(self.folder)
        wait(lambda: job.process.poll() is not None, "torchrun")
        self.status = job.process.returncode
        if not moment.exists():
            self.seconds = time.time() - began
        if fault.ending is not Ending.GOES_ON:
            self.lost = self._iterations_lost()
        ended = time.monotonic()
        wait(lambda: not job.processes(), "processes that torchrun has left behind")
        self.longest = time.monotonic() - ended
        self.after = saved_files(self.folder)

    def _iterations_lost(self) -> int:
        """Return how many iterations the next attempt, or job, has to do again."""
        done = re.findall(r"iteration +(\d+)/", self.job.output(0, self.fault.stages - 1))
        if self.fault.ending is Ending.RESTARTS:
            loaded = re.search(r"loaded checkpoint .* at iteration (\d+)", self.job.output(1, 0))
            kept = int(loaded[1]) if loaded else 0
        else:
            kept = last_saved(self.folder)
        return int(done[-1]) - kept if done else 0

    def error(self, reason: str) -> FaultError:
        """Return an error with the outputs of all ranks."""
        log = (self.folder / "torchrun.log").read_text(errors="replace")
        attempts = "".join(tails(self.job, attempt) for attempt in range(2))
        return FaultError(f"{self.fault.words}: {reason}\n{log[-2000:]}\n{attempts}")

    def check(self, undisturbed: list[dict] | None) -> None:
        """Raise ``FaultError`` unless all is as it should be.

        Args:
            undisturbed: What the ranks of a job without a fault end with; None where this one is
                not to end with the same.
        """
        fault = self.fault

        def require(condition: bool, reason: str) -> None:
            if not condition:
                raise self.error(reason)

        for reason in unsaid(fault, [self.job.output(0, rank) for rank in range(fault.stages)]):
            raise self.error(reason)
        require(self.status == fault.status, f"torchrun's exit status is {self.status}")
        if fault.ending is Ending.GOES_ON:
            require(not self.job.output(1, 0), "there was a second attempt")
        unchanged = self.before.items() <= self.after.items()
        require(unchanged, "a checkpoint of before has changed")
        if undisturbed is not None:
            require(self.finals == undisturbed, f"ends as {self.finals}, not {undisturbed}")


def unsaid(fault: Fault, outputs: list[str]) -> list[str]:
    """Return what ranks have not said though they should have.

    Args:
        outputs: What each rank has written to both of its outputs.
    """
    missing = []
    for rank, output in enumerate(outputs):
        state = STATE.format(rank=rank, stages=fault.stages)
        for words in (*([] if rank in fault.silent else [state]), *fault.says.get(rank, ())):
            if not re.search(words, output):
                missing.append(f"rank {rank} does not say {words!r}")
    return missing


def run_undisturbed(fault: Fault, folder: Path, extra: str = "", *, limit: float) -> list[dict]:
    """Run the job of a fault without it; return what the ranks have ended training with."""
    folder.mkdir(exist_ok=True)
    job = Job(fault.undisturbed(extra), folder, {})
    try:
        if job.process.wait(limit):
            raise FaultError(f"{fault.words}: fails without the fault\n{tails(job, 0)}")
    finally:
        job.kill()
    return final_states(fault, folder)


def alive(processes: list[int]) -> bool:
    """Whether any of these processes still runs; one that was not waited for does not."""
    for process in processes:
        try:
            status = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            continue
        if status.rpartition(")")[2].split()[0] not in "ZX":
            return True
    return False


def tails(job: Job, attempt: int) -> str:
    """Return the ends of the outputs of an attempt."""
    return "".join(
        f"--- attempt {attempt}, rank {rank}\n{job.output(attempt, rank)[-3000:]}\n"
        for rank in range(job.fault.stages)
    )
