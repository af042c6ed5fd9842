"""Runs the scripts of examples/ with stand-ins for the commands that this machine has not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
KEPT = ("HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")

# Runs its command once per node, here. Like Slurm's, it kills the tasks when it gets SIGTERM.
SRUN = """
while [[ $1 == --* ]]; do shift; done
tasks=()
trap 'kill -KILL "${tasks[@]}"; exit 143' TERM
for ((node = 0; node < SLURM_NNODES; node++)); do
    SLURM_NODEID=$node SLURMD_NODENAME=localhost "$@" &
    tasks+=($!)
done
printf '%s\\n' "${tasks[@]}" >"$SLURM_FOLDER/tasks"
status=0
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit $status
"""
# A signal goes to the tasks, not to their children and not to the batch script.
SCANCEL = """
[[ $1 == --signal=TERM && $2 == "$SLURM_JOB_ID" ]] || exit 1
kill -TERM $(<"$SLURM_FOLDER/tasks")
"""
SCONTROL = """
case $1 in
show) for ((node = 0; node < SLURM_NNODES; node++)); do echo localhost; done ;;
requeue) echo "$2" >>"$SLURM_FOLDER/requeued" ;;
esac
"""


def stand_in(folder: Path, name: str, text: str) -> None:
    """Write a command into ``folder``, which has to come first in PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\nset -uo pipefail\n{text}")
    (folder / name).chmod(0o755)


def stand_in_slurm(folder: Path, *, nodes: int, job: str = "4711") -> dict[str, str]:
    """Write Slurm's commands into ``folder``; return the environment of a batch script."""
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        stand_in(folder, name, text)
    return {
        "SLURM_FOLDER": str(folder), "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": job,
        "SLURM_JOB_NODELIST": f"node[1-{nodes}]", "SLURM_NNODES": str(nodes),
    }


def environment(commands: Path, variables: dict[str, object]) -> dict[str, str]:
    """Return an environment of ``variables`` and little else, with ``commands`` first in PATH.

    Any variable of this process may have the name of one that a script reads.
    """
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    path = os.pathsep.join((str(commands), str(Path(sys.executable).parent), os.environ["PATH"]))
    return kept | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | {
        name: str(value) for name, value in variables.items()
    }


def run_script(script: Path, *arguments: str, commands: Path, seconds: float = 60,
               **variables: object) -> subprocess.CompletedProcess:
    """Run a script to its end; its variables are keyword arguments."""
    return subprocess.run(
        ["bash", str(script), *arguments], env=environment(commands, variables),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds,
    )


def started_with(script: Path, *arguments: str, commands: Path, **variables: object) -> list[str]:
    """Run a script whose torchrun is one that starts nothing; return the arguments it was given."""
    record = commands / "torchrun.arguments"
    stand_in(commands, "torchrun", f"printf '%s\\0' \"$@\" >{record}\n")
    ended = run_script(script, *arguments, commands=commands, **variables)
    assert ended.returncode == 0, ended.stderr
    return record.read_text().split("\0")[:-1]
