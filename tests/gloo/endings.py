"""One rank that does ``python -m megatron_paci run`` again and again, each in a process of its own.

A program for ``bench.ranks.run_ranks``: unlike worker.py it lets every run end like a real one,
with the exit status that torchrun would see. Megatron is imported once and the runs are forked. ::

    endings.py FOLDER

A run has a ``script`` and ``arguments``, maybe an ``environment`` and ``terminate_after``: the
iteration after whose log line this rank's process gets SIGTERM. Its result is the exit ``status``
and the ``output``. With a WORLD_SIZE in its environment the first so many ranks do it alone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_paci.bench.rank import end_with_parent  # noqa: E402
from megatron_paci.cpu import CpuDevice, cpu_environment, cpu_flags  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def run_command(run: dict, log: Path) -> int:
    """In the forked process: do what the command line does; its output goes to ``log``."""
    from megatron_paci.__main__ import main as command

    end_with_parent()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {"MASTER_PORT": str(run["port"])} | run.get("environment", {})
    arguments = run["arguments"]
    return command(["run", str(ROOT / run["script"]), *arguments, *cpu_flags(arguments)])


def wait(process: int, terminate_after: int | None, log: Path) -> int:
    """Return the exit status; send SIGTERM when the last rank has logged an iteration."""
    while terminate_after:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status
        if log.exists() and re.search(rf"iteration +{terminate_after}/", log.read_text()):
            os.kill(process, signal.SIGTERM)
            break
        time.sleep(0.01)
    return os.waitpid(process, 0)[1]


def main() -> int | None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    ranks = range(int(os.environ["WORLD_SIZE"]))
    os.environ.update(cpu_environment(os.environ))
    CpuDevice().install()  # for the life of this process and those that it starts
    import megatron.training  # noqa: F401  (before the first fork)

    for number, run in enumerate(json.loads((folder / "runs.json").read_text())):
        results = [folder / f"{number}.rank{each}.json" for each in ranks]
        size = int(run.get("environment", {}).get("WORLD_SIZE", len(ranks)))
        result = None
        if rank < size:
            logs = [folder / f"{number}.rank{each}.out" for each in ranks[:size]]
            process = os.fork()
            if process == 0:
                return run_command(run, logs[rank])
            status = wait(process, run.get("terminate_after"), logs[-1])
            result = {
                "status": os.waitstatus_to_exitcode(status),
                "output": logs[rank].read_text(errors="replace"),
            }
        results[rank].write_text(json.dumps(result))
        while not all(file.exists() for file in results):  # nobody waits in the next run
            time.sleep(0.02)
    return None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(1)
