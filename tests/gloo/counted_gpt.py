"""examples/pretrain_gpt.py that counts now and then what this rank holds. ::

    counted_gpt.py --count STEM --count-at K [K ...] [--rounds R] [--leak] <pretrain_gpt.py's flags>

Counts after some iterations, or with ``--rounds`` trains so many times in a row and counts after
some of those. ``STEM.rank<r>.json`` receives one entry for each ``K``:

============  ==================================================================================
``resident``  Bytes of memory of this process.
``storage``   Bytes of all tensors that Python can reach.
``handles``   Open files and sockets.
``threads``   Threads, those of PyTorch included.
``groups``    Process groups.
``stages``    Stages of PACI that are alive.
``held``      Length of every collection of the stage, by path (``probes.held``).
``record``    Likewise of ``--paci-record``.
============  ==================================================================================

``--leak`` plants leaks: in every iteration a file and, only reachable by autograd, a tensor of the
size of a message; and a send that never counts as arrived, so that all later ones wait behind it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path

import torch
from megatron.training.global_vars import get_timers
from torch.distributed.distributed_c10d import _world

from examples import pretrain_gpt
from megatron_paci import hooks
from megatron_paci.build import MegatronStage, installed_stage
from megatron_paci.patching import Patch, PatchSet
from tests.gloo.probes import held, live_storage_bytes

MESSAGE = 32 * 8 * 128  # elements: sequence, microbatch, hidden size in test_endurance.py


class NeverArrives:
    """Takes the place of the handle of a send."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        pass


class Counter:
    """Wraps Megatron's training loop and step."""

    def __init__(self, options: argparse.Namespace):
        self.found: list[dict] = []
        self._options = options
        self._done = 0
        self._leaked: list = []

    def train_step(self, original, *args, **kwargs):
        result = original(*args, **kwargs)
        if self._options.leak:
            self._leak()
        if not self._options.rounds:
            self._note()
        return result

    def train(self, original, *args, **kwargs):
        for _ in range(self._options.rounds or 1):
            result = original(*args, **kwargs)
            if self._options.rounds:
                get_timers()("interval-time").stop()  # the next round starts it again
                self._note()
        return result

    def _note(self) -> None:
        self._done += 1
        if self._done not in self._options.count_at:
            return
        storage = live_storage_bytes()  # collects garbage first
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.found.append({
            "resident": pages * os.sysconf("SC_PAGE_SIZE"),
            "storage": storage,
            "handles": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "groups": len(_world.pg_map),
            "stages": sum(isinstance(item, MegatronStage) for item in gc.get_objects()),
            "held": held(installed_stage(), "stage"),
            "record": held(hooks._recorder, "record"),
        })

    def _leak(self) -> None:
        if not self._leaked:
            channel = installed_stage().engine.channel
            link = channel._forward_out or channel._backward_out
            link._sent.appendleft((sys.maxsize, NeverArrives(), torch.zeros(1)))
        self._leaked.append(open(os.devnull))
        self._leaked.append(torch.zeros(MESSAGE, requires_grad=True).exp().grad_fn)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--count", required=True)
    parser.add_argument("--count-at", type=int, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--leak", action="store_true")
    options, sys.argv[1:] = parser.parse_known_args()
    counter = Counter(options)
    training = "megatron.training.training"
    patches = PatchSet([
        Patch(f"{training}:train", counter.train, (), "trains several times"),
        Patch(f"{training}:train_step", counter.train_step, (), "counts"),
    ])
    patches.install()
    try:
        pretrain_gpt.main()
    finally:
        patches.uninstall()
        path = Path(f"{options.count}.rank{os.environ['RANK']}.json")
        path.write_text(json.dumps(counter.found))


if __name__ == "__main__":
    main()
