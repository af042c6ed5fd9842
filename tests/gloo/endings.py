"""Does ``python -m megatron_paci run`` again and again, each rank in a process of its own.

A program for ``bench.ranks.run_ranks`` on one process: unlike worker.py it lets every rank end like
a real one, with the exit status that torchrun would see. Megatron is imported once and the ranks
are forked. ::

    endings.py FOLDER

A run has a ``script``, ``arguments`` and ``size``, the number of its ranks, maybe an
``environment`` and ``terminate_after``: the iteration after whose log line all ranks get SIGTERM.
Its result is the exit ``status`` and the ``output`` of every rank.
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
from megatron_paci.cpu import cpu_flags  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def run_command(run: dict, rank: int, log: Path) -> int:
    """In the forked process: do what the command line does; its output goes to ``log``."""
    from megatron_paci.__main__ import main as command

    end_with_parent()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {
        "MASTER_PORT": str(run["port"]),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(run["size"]),
        "LOCAL_WORLD_SIZE": str(run["size"]),
    } | run.get("environment", {})
    arguments = run["arguments"]
    return command(["run", str(ROOT / run["script"]), *arguments, *cpu_flags(arguments)])


def terminate(processes: list[int], iteration: int, log: Path) -> None:
    """Send SIGTERM to all when the last one has logged an iteration, unless it has ended."""
    pattern = rf"iteration +{iteration}/"
    while not re.search(pattern, log.read_text() if log.exists() else ""):
        if os.waitid(os.P_PID, processes[-1], os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.01)
    for process in processes:
        os.kill(process, signal.SIGTERM)


def main() -> int | None:
    folder = Path(sys.argv[1])
    import tests.gloo.imported  # noqa: F401  (before the first fork)

    for number, run in enumerate(json.loads((folder / "runs.json").read_text())):
        logs = [folder / f"{number}.rank{rank}.out" for rank in range(run["size"])]
        processes = []
        for rank, log in enumerate(logs):
            process = os.fork()
            if process == 0:
                return run_command(run, rank, log)
            processes.append(process)
        if run.get("terminate_after"):
            terminate(processes, run["terminate_after"], logs[-1])
        results = [
            {
                "status": os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]),
                "output": log.read_text(errors="replace"),
            }
            for process, log in zip(processes, logs, strict=True)
        ]
        (folder / f"{number}.rank0.json").write_text(json.dumps(results))
    return None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(1)
