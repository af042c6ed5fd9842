"""Starts a launch script under torchrun, as a user does."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def torchrun(num_ranks: int, *arguments: str, python_path: tuple[Path, ...] = (),
             seconds: float = 180, **environment: str) -> str:
    """Run ``torchrun --nproc-per-node num_ranks ARGUMENTS`` and return the output of all ranks.

    Nothing is left when the time is up, which is ``seconds`` times the environment's
    TEST_TIME_FACTOR. Any other exit status than 0 is an AssertionError with the end of the output.
    """
    seconds *= float(os.environ.get("TEST_TIME_FACTOR", "1"))
    folders = os.pathsep.join(map(str, (*python_path, ROOT)))
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(num_ranks), *arguments],
        env=os.environ | {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        end(process)
    assert process.returncode == 0, output[-4000:]
    return output


def end(process: subprocess.Popen) -> None:
    """End torchrun and its ranks: they are in sessions of their own, so it has to do that itself.

    It gives them 30 seconds after the signal and kills them then.
    """
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=45)
    process.kill()
    process.wait()
