"""Does the runs of a plan that are not done yet, one after another."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import sys
import time
from typing import Any

from megatron_paci.compare.launch import RunError, train
from megatron_paci.compare.plan import Plan, Run
from megatron_paci.compare.records import RecordError, read_records, run_figures
from megatron_paci.terminal import say

STATE = "run.json"
LOG = "log.txt"


def do_runs(
    plan: Plan,
    *,
    again: bool = False,
    stall_seconds: float | None = None,
) -> None:
    """Do every run of the plan that has not been done with the same command, script and versions.

    What a run prints goes to ``log.txt`` in its folder, how it ended to ``run.json``. A run that
    fails does not keep the others from being done.

    Args:
        again: Do all of them.
        stall_seconds: See ``launch.train``.

    Raises:
        OSError: A folder cannot be written to.
    """
    open_runs = [run for run in plan.runs if again or not is_done(run, plan.identity(run))]
    for number, run in enumerate(plan.runs, start=1):
        label = f"{run.label} ({number}/{len(plan.runs)})"
        if run not in open_runs:
            say(f"{label}: done before, see {run.folder}")
            continue
        runs_after = len(open_runs) - open_runs.index(run) - 1
        _do(run, plan, label, runs_after, stall_seconds)


def is_done(run: Run, identity: dict[str, Any]) -> bool:
    """Whether this very run has ended well and left its record."""
    state = read_state(run)
    if state.get("state") != "done" or state.get("identity") != identity:
        return False
    try:
        run_figures(read_records(run.record))
    except RecordError:
        return False
    return True


def read_state(run: Run) -> dict[str, Any]:
    """Return what is known of how a run ended; empty if nothing is."""
    try:
        found = json.loads((run.path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _do(
    run: Run, plan: Plan, label: str, runs_after: int, stall_seconds: float | None
) -> None:
    # Nothing of an earlier run with this name may be taken for one of this.
    if run.path.exists():
        shutil.rmtree(run.path)
    run.path.mkdir(parents=True)
    log = run.path / LOG
    say(f"{label}: log in {log}")
    state = {
        "state": "running",
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "identity": plan.identity(run),
    }
    _write(run, state)
    begin = time.monotonic()
    short = plan.short
    try:
        train(
            run.command, label=label, log=log, done=short.done if short else 0,
            iterations=short.iterations if short else None, runs_after=runs_after,
            stall_seconds=stall_seconds,
        )
        state["state"] = "done"
    except (RunError, OSError) as error:
        state |= {"state": "failed", "error": str(error)}
        sys.stderr.write(f"{error}\n")
    except KeyboardInterrupt:
        state |= {"state": "failed", "error": f"{run.label} was interrupted"}
        raise
    finally:
        state["run_seconds"] = round(time.monotonic() - begin, 1)
        state["load_after"] = round(os.getloadavg()[0], 2)
        _write(run, state)


def _write(run: Run, state: dict[str, Any]) -> None:
    (run.path / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
