"""examples/pretrain_gpt.py in which one rank suffers a fault; the environment's FAULT says which.

FAULT is JSON: a ``folder`` and, unless nothing is to happen, ``rank``, ``moment`` with its number
``at`` and what to ``do`` then (see ``Plan``). It happens only in the first attempt of torchrun. The
moment goes to ``fault.json`` in the folder, the state in which a rank ends training to
``final.<rank>.json``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset  # noqa: E402
from megatron.core.dist_checkpointing.strategies.filesystem_async import (  # noqa: E402
    FileSystemWriterAsync,
)
from megatron.training import training  # noqa: E402

from examples import pretrain_gpt  # noqa: E402
from megatron_paci.build import installed_stage  # noqa: E402
from megatron_paci.compute import MegatronCompute  # noqa: E402
from megatron_paci.window import MegatronWindow  # noqa: E402
from tests.gloo.probes import digest, optimizer_tensors  # noqa: E402

MockGPTLowLevelDataset.size = 1000  # its 100,000 documents take longer than the training

LEFT_TO_OTHERS = ("nothing", "end_data", "spoil")  # to who starts this, or asks ``reached``


class Plan:
    """What is to happen to this rank, and when.

    Moments are counted from 0, each kind by itself: ``forward`` (before one of training),
    ``evaluated`` (before a forward of evaluation), ``drained`` (before a backward in a drain),
    ``settled`` (at the end of a drain), ``saved`` (when this rank has written a file of a
    checkpoint), ``written`` (likewise its part of one in the format torch_dist).
    """

    def __init__(self, folder: str, rank: int = -1, moment: str = "", at: int = 0, do: str = "",
                 seconds: float = 0, count: int = 1):
        """Nothing has happened yet.

        Args:
            seconds: How long to sleep or to be stopped; 0 for ever.
            count: Sleep at so many moments, one after another.
        """
        self.folder = Path(folder)
        self.rank = int(os.environ["RANK"])
        first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        self._moment = moment if rank == self.rank and first_attempt else ""
        self._when = range(at, at + count)
        self._do = do
        self._seconds = seconds
        self._seen: Counter[str] = Counter()

    def reached(self, moment: str) -> str:
        """Count a moment; if it is the planned one do what is planned, and return that."""
        number = self._seen[moment]
        self._seen[moment] += 1
        if moment != self._moment or number not in self._when:
            return ""
        if number == self._when[0]:
            self._announce()
        if self._do not in LEFT_TO_OTHERS:
            getattr(self, f"_{self._do}")()
        return self._do

    def _announce(self) -> None:
        unfinished = self.folder / "fault.unfinished"
        unfinished.write_text(json.dumps({"time": time.time(), "process": os.getpid()}))
        unfinished.rename(unfinished.with_suffix(".json"))

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        if self._seconds:
            subprocess.Popen(["sh", "-c", f"sleep {self._seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    def _sleep(self) -> None:
        time.sleep(self._seconds)

    def _fail(self) -> None:
        raise RuntimeError("the planned failure")

    def _leave(self) -> None:
        sys.exit(0)

    def _terminate(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def _terminate_twice(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    def _interrupt(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def _exhaust_memory(self) -> None:
        """Let the process have no more memory than it has, and ask for some."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        used = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used, used))
        torch.ones(2**30)


PLAN = Plan(**json.loads(os.environ["FAULT"]))
forward_step = pretrain_gpt.forward_step
backward = MegatronCompute.backward
settle = MegatronWindow.settle
save_file = torch.save
end_write = FileSystemWriterAsync.retrieve_write_results
train = training.train


def faulty_forward_step(data_iterator, model):
    done = PLAN.reached("forward" if model.training else "evaluated")
    output, loss = forward_step(iter(()) if done == "end_data" else data_iterator, model)
    return output * math.nan if done == "spoil" else output, loss


def faulty_backward(*args):
    if "draining the pipeline" in installed_stage().activity.describe():
        PLAN.reached("drained")
    return backward(*args)


def faulty_settle(window):
    PLAN.reached("settled")
    settle(window)


def faulty_save_file(*args, **kwargs):
    save_file(*args, **kwargs)
    PLAN.reached("saved")


def faulty_end_write(writer):
    PLAN.reached("written")
    return end_write(writer)


def observed_train(*args, **kwargs):
    result = train(*args, **kwargs)
    model, optimizer = args[1][0], args[2]
    state = {
        "weights": digest(model.parameters()), "optimizer": digest(optimizer_tensors(optimizer))
    }
    (PLAN.folder / f"final.{PLAN.rank}.json").write_text(json.dumps(state))
    return result


def main() -> None:
    with contextlib.ExitStack() as patches:
        for target, name, replacement in (
            (pretrain_gpt, "forward_step", faulty_forward_step),
            (MegatronCompute, "backward", faulty_backward),
            (MegatronWindow, "settle", faulty_settle),
            (torch, "save", faulty_save_file),
            (FileSystemWriterAsync, "retrieve_write_results", faulty_end_write),
            (training, "train", observed_train),
        ):
            patches.enter_context(mock.patch.object(target, name, replacement))
        pretrain_gpt.main()


if __name__ == "__main__":
    main()
