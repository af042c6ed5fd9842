"""The faults of docs/reliability.md: what is done to a job, and what is to become of it.

A job trains 8 iterations of 4 microbatches (16 forwards by the end of iteration 4), saves every
second one, evaluates every third one; its pipeline drains for the save of iteration 2, the
evaluation after 3, the save of 4, the evaluation after 6, which a save follows, and at the end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path

from tests.gloo.launch import TINY_GPT, flags

ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
MOCK_DATA = "--mock-data"
JOB = (
    f"{TINY_GPT.replace(MOCK_DATA, '')} --attention-dropout 0.1 --hidden-dropout 0.1 "
    "--global-batch-size 8 --train-iters 8 --lr-decay-iters 8 --save-interval 2 "
    "--eval-interval 3 --eval-iters 2 "
    "--pipeline-schedule paci --paci-accum 2 --ckpt-format torch --distributed-timeout-minutes 1"
)
IN_ITERATION_6 = 21  # a forward; the checkpoints of 2 and 4 are there
DIST = "--ckpt-format torch_dist"


class Ending(Enum):
    """What becomes of a job."""

    RESTARTS = auto()
    """All ranks end, torchrun starts them again, and they resume from the last checkpoint."""
    GOES_ON = auto()
    """It trains to the end as if nothing had happened."""
    SAVES = auto()
    """All ranks save a checkpoint and end with status 0; started again, the job goes on."""
    STOPS = auto()
    """All ranks and torchrun end; started again, the job resumes from the last checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault and its outcome.

    Attributes:
        words: What it is.
        happens: What becomes of it, in words.
        plan: What faulty_gpt.py does.
        ending: What becomes of the job.
        stages: Pipeline stages, which are all ranks.
        extra: Flags, they win over those of ``JOB``.
        data: Flags for the data of the job with the fault.
        silent: Ranks that cannot say anything.
        says: Expressions to be found in the output of a rank, besides its state.
        first: Flags of a job without a fault that trains in the same folder before, if any.
        prepare: Done to the folder before the job starts.
        outside: Done at the planned moment, with the process of torchrun.
        afterwards: Done to the folder when all ranks of the first attempt have ended.
        again: Flags for starting the job again.
        restarts: What torchrun gets as --max-restarts.
        status: Exit status of torchrun.
        leaves: What the command lines of processes hold that are left for good. Megatron's format
            torch_dist starts a server of multiprocessing that does not notice a killed rank.
    """

    words: str
    happens: str
    plan: dict = field(default_factory=dict)
    ending: Ending = Ending.RESTARTS
    stages: int = 2
    extra: str = ""
    data: str = MOCK_DATA
    silent: tuple[int, ...] = ()
    says: dict[int, tuple[str, ...]] = field(default_factory=dict)
    first: str | None = None
    prepare: Callable[[Path], None] | None = None
    outside: Callable[[int], None] | None = None
    afterwards: Callable[[Path], None] | None = None
    again: str = ""
    restarts: int = 1
    status: int = 0
    leaves: str = ""

    def undisturbed(self, extra: str = "") -> Fault:
        """Return the same job without the fault."""
        return replace(
            self, plan={}, extra=f"{self.extra} {extra}", data=MOCK_DATA, first=None,
            prepare=None, outside=None, afterwards=None, restarts=0,
        )


def command_line(fault: Fault, folder: Path) -> list[str]:
    """Return the flags of Megatron."""
    saved = folder / "saved"
    return flags(fault.stages, f"--save {saved} --load {saved} {fault.data} {fault.extra}", JOB)


def at(rank: int, moment: str, number: int, do: str, **more: float) -> dict:
    """Return a plan of faulty_gpt.py."""
    return {"rank": rank, "moment": moment, "at": number, "do": do, **more}


def signal_torchrun(number: int) -> Callable[[int], None]:
    return lambda process: os.kill(process, number)


PART_1 = "mp_rank_00_001/model_optim_rng.pt"  # of the second stage
DIST_PART_1 = "__1_0.distcp"


def saved(folder: Path, iteration: int, name: str = "") -> Path:
    """Return a file of a checkpoint in a job's folder, or the folder of the checkpoint."""
    return folder / f"saved/iter_{iteration:07d}" / name


def fill_disk(name: str) -> Callable[[Path], None]:
    """Put a file of iteration 4 on a device that is always full."""

    def prepare(folder: Path) -> None:
        file = saved(folder, 4, name)
        file.parent.mkdir(parents=True)
        file.symlink_to("/dev/full")

    return prepare


def free_disk(name: str) -> Callable[[Path], None]:
    return lambda folder: saved(folder, 4, name).unlink()


def block_folder(folder: Path) -> None:
    """Let iteration 4 have no folder, since there is a file of this name."""
    file = saved(folder, 4)
    file.parent.mkdir(parents=True)
    file.write_text("")


def unblock_folder(folder: Path) -> None:
    saved(folder, 4).unlink()


def truncate(folder: Path) -> None:
    """Cut what the second stage has saved last."""
    file = saved(folder, 6, PART_1)
    os.truncate(file, file.stat().st_size // 2)


CLOSED = "Connection (closed|reset) by peer"
KILLED = "the others fail at the closed connection or are ended by torchrun; resumes"
KILLED_DIST = f"{KILLED}; a helper process of Megatron's is left"
FAILED = "it says so, the others like those of a killed one; resumes"
FAULTS: dict[str, Fault] = {}


def add(name: str, words: str, happens: str, **fields) -> None:
    FAULTS[name] = Fault(words=words, happens=happens, **fields)


# Killed

for name, words, rank, moment, number in (
    ("warm-up", "in the warm-up, before its first backward", 0, "forward", 1),
    ("drain", "in a drain", 0, "drained", 2),
    ("drain-end", "at the end of a drain", 1, "settled", 2),
    ("save", "in a save, after its file is written", 1, "saved", 1),
    ("save-first", "in a save, after its file is written", 0, "saved", 1),
    ("evaluation", "in an evaluation", 1, "evaluated", 1),
):
    add(f"kill-in-{name}", f"`kill -9` of rank {rank} {words}", KILLED,
        plan=at(rank, moment, number, "kill"), silent=(rank,))
for name, rank in (("first", 0), ("middle", 1), ("last", 3)):
    add(f"kill-{name}", f"`kill -9` of rank {rank} of 4 in the filled stream", KILLED,
        plan=at(rank, "forward", IN_ITERATION_6, "kill"), stages=4, silent=(rank,))
add("kill-in-warm-up-middle", "`kill -9` of rank 2 of 4 in the warm-up", KILLED,
    plan=at(2, "forward", 1, "kill"), stages=4, silent=(2,))
add("kill-in-save-dist", "`kill -9` of rank 1 in a save in the format torch_dist, after its part",
    KILLED_DIST, plan=at(1, "written", 1, "kill"), extra=DIST, silent=(1,),
    leaves="multiprocessing")
add("kill-with-async-save", "likewise with `--async-save`, between the saves", KILLED_DIST,
    plan=at(1, "forward", IN_ITERATION_6, "kill"), extra=f"{DIST} --async-save", silent=(1,),
    leaves="multiprocessing")
add("kill-with-loaders", "`kill -9` of rank 0 with `--num-workers 2`", KILLED,
    plan=at(0, "forward", IN_ITERATION_6, "kill"), extra="--num-workers 2", silent=(0,))
add("kill-with-handler", "`kill -9` of rank 1 with `--exit-signal-handler`",
    "the others fail at the closed connection, their handler only notes torchrun's SIGTERM; "
    "resumes", plan=at(1, "forward", IN_ITERATION_6, "kill"), extra="--exit-signal-handler",
    silent=(1,), says={0: (CLOSED,)})

# Failed

for name, rank in (("first", 0), ("middle", 2), ("last", 3)):
    add(f"error-{name}", f"an exception in `forward_step` of rank {rank} of 4", FAILED, stages=4,
        plan=at(rank, "forward", IN_ITERATION_6, "fail"), says={rank: ("the planned failure",)})
for name, rank in (("first", 0), ("last", 1)):
    add(f"data-ends-{name}", f"the data of rank {rank} end in the middle of an iteration", FAILED,
        plan=at(rank, "forward", IN_ITERATION_6, "end_data"), says={rank: ("StopIteration",)})
add("memory", "rank 1 gets no more memory (`RLIMIT_AS`)", FAILED,
    plan=at(1, "forward", IN_ITERATION_6, "exhaust_memory"), says={1: ("can't allocate memory",)})
add("nan", "NaN in an activation with `--paci-nonfinite abort`", FAILED,
    plan=at(0, "forward", IN_ITERATION_6, "spoil"), extra="--paci-nonfinite abort",
    says={1: ("NonFiniteGradient: stage 1, window 10: the norm of the gradient is nan",)})
add("leave", "`sys.exit(0)` in `forward_step` of rank 1",
    "the others fail at the closed connection; resumes",
    plan=at(1, "forward", IN_ITERATION_6, "leave"), silent=(1,), says={0: (CLOSED,)})

# Checkpoints

add("disk-full", "a full disk in a save (ENOSPC of `/dev/full`), rank 1", FAILED,
    plan=at(1, "settled", 2, "nothing"), prepare=fill_disk(PART_1), afterwards=free_disk(PART_1),
    says={1: ("saving a checkpoint",)})
add("disk-full-dist", "likewise in the format torch_dist", FAILED, extra=DIST,
    plan=at(1, "settled", 2, "nothing"), prepare=fill_disk(DIST_PART_1),
    afterwards=free_disk(DIST_PART_1), says={1: ("saving a checkpoint",)})
add("unwritable", "no folder can be made for a checkpoint", FAILED,
    plan=at(1, "settled", 2, "nothing"), prepare=block_folder, afterwards=unblock_folder,
    says={0: ("(NotADirectoryError|FileExistsError)",)})
add("error-in-save", "an exception in a save, rank 1, after its file is written", FAILED,
    plan=at(1, "saved", 1, "fail"), says={1: ("saving a checkpoint",)})
add("truncated", "the file of rank 1 in the last checkpoint is cut in half before the start",
    "loading fails with the reason; `--ckpt-step 4` loads the one before",
    ending=Ending.STOPS, status=1, restarts=0, silent=(0, 1), first="--exit-interval 6",
    prepare=truncate, again="--ckpt-step 4",
    says={1: ("PytorchStreamReader failed",)})
add("data-missing", "the data file is not there", "the start fails with the name",
    ending=Ending.STOPS, status=1, first="--exit-interval 4", restarts=0, silent=(0, 1),
    data="--data-path /nowhere/corpus", says={0: ("/nowhere/corpus",)})

# Slow

add("slow", "rank 1 takes 50 ms more for each of 8 forwards, about ten times as long",
    "goes on, bitwise the same", ending=Ending.GOES_ON, silent=(0, 1),
    plan=at(1, "forward", 14, "sleep", seconds=0.05, count=8))
add("stopped", "SIGSTOP of rank 1 for 5 s", "goes on, bitwise the same", silent=(0, 1),
    ending=Ending.GOES_ON, plan=at(1, "forward", IN_ITERATION_6, "stop", seconds=5))
add("stopped-for-good", "SIGSTOP of rank 1 for good with `--distributed-timeout-minutes 1`",
    "after 54 s rank 0 says where it waits, after 60 s it fails, torchrun's SIGTERM has no effect "
    "on the stopped one, its SIGKILL has 30 s later; resumes",
    plan=at(1, "forward", IN_ITERATION_6, "stop"), silent=(1,),
    says={0: ("nothing has been done for 5[4-9] s", "[Tt]imed out")})
add("stall", "rank 1 sleeps for 8 s with `--paci-stall-seconds 4`",
    "all ranks say where they are, goes on, bitwise the same", ending=Ending.GOES_ON,
    plan=at(1, "forward", IN_ITERATION_6, "sleep", seconds=8), extra="--paci-stall-seconds 4",
    says={0: ("nothing has been done for [4-7] s",), 1: ("nothing has been done for [4-7] s",)})

# Signals

TERM = int(signal.SIGTERM)
HANDLER = "--exit-signal-handler"
for name, words, rank, do, extra in (
    ("term", "SIGTERM", 1, "terminate", HANDLER),
    ("int", "SIGINT", 0, "interrupt", f"{HANDLER} --exit-signal SIGINT"),
    ("term-twice", "SIGTERM twice", 0, "terminate_twice", HANDLER),
):
    add(f"{name}-saves", f"{words} to rank {rank} with `{extra}`",
        "all save after the same iteration and end with status 0; goes on from there",
        ending=Ending.SAVES, plan=at(rank, "forward", 16, do), extra=extra, silent=(0, 1))
add("term-torchrun-saves", f"SIGTERM to torchrun with `{HANDLER}`",
    "it passes it on; all save and end with status 0, torchrun with 1; goes on from there",
    plan=at(1, "forward", 16, "sleep", seconds=1), outside=signal_torchrun(TERM), extra=HANDLER,
    silent=(0, 1), ending=Ending.SAVES, status=1)
add("term", "SIGTERM to rank 1, no handler", "it says where it is and ends; resumes",
    plan=at(1, "forward", IN_ITERATION_6, "terminate"), says={1: ("SIGTERM",)})
add("term-loaders", "likewise with `--num-workers 2`", "likewise; its loaders end 5 s later",
    extra="--num-workers 2",
    plan=at(1, "forward", IN_ITERATION_6, "terminate"), says={1: ("SIGTERM",)})
add("int", "SIGINT to rank 0, no handler", "KeyboardInterrupt, like any exception; resumes",
    plan=at(0, "forward", IN_ITERATION_6, "interrupt"), says={0: ("KeyboardInterrupt",)})
for name, number in (("term", signal.SIGTERM), ("int", signal.SIGINT)):
    add(f"{name}-torchrun", f"{number.name} to torchrun, no handler",
        "it passes it on, all say where they are and end", ending=Ending.STOPS, status=1,
        plan=at(1, "forward", IN_ITERATION_6, "sleep", seconds=1),
        outside=signal_torchrun(int(number)))
add("kill-torchrun", "`kill -9` of torchrun", "the ranks train to the end by themselves",
    ending=Ending.STOPS, plan=at(1, "forward", IN_ITERATION_6, "sleep", seconds=1),
    outside=signal_torchrun(int(signal.SIGKILL)), silent=(0, 1), status=-int(signal.SIGKILL))
