"""The examples that stand alone, as a user starts them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def torchrun(*arguments: str, seconds: float = 180) -> str:
    """Run two ranks and return their output; nothing is left when the time is up."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output[-4000:]
    return output


def test_a_loop_of_ones_own_on_megatron_core_alone():
    output = torchrun(str(ROOT / "examples/train_mcore_loop.py"), "--cpu")
    losses = [float(loss) for loss in re.findall(r"iteration \d+: loss (\S+)", output)]
    assert len(losses) == 3 and losses[-1] < 0.1 < losses[0]
