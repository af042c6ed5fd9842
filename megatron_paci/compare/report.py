"""Puts the runs of a plan together: report.json, pictures, report.md and report.html."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_paci.compare import pictures
from megatron_paci.compare.content import content
from megatron_paci.compare.document import Picture, to_html, to_markdown
from megatron_paci.compare.plan import SCHEDULES, Plan, Run
from megatron_paci.compare.predict import predicted_seconds
from megatron_paci.compare.records import RecordError, read_records, run_figures, to_json
from megatron_paci.compare.runs import read_state
from megatron_paci.compare.short_verdict import short_verdict
from megatron_paci.compare.traces import timeline_panel, trace_figures
from megatron_paci.compare.verdict import verdict
from megatron_paci.compare.virtual import measure_virtual, stored_virtual
from megatron_paci.plots import plot_losses
from megatron_paci.simulate.picture import draw_panels
from megatron_paci.trace_file import TraceError
from megatron_paci.version import versions

CONDITIONS = ("started", "run_seconds", "cores", "load_before", "load_after")


def collect(plan: Plan, *, virtual: bool = False, notes: Mapping[str, Any] | None = None) -> dict:
    """Return the contents of report.json.

    Args:
        virtual: Whether to measure in virtual time as well, where that has not been done.
        notes: More that belongs into the report.
    """
    runs = {run.name: _figures(run) for run in plan.runs}
    good = {name: run for name, run in runs.items() if run["state"] == "done"}
    # What passes cost under 1F1B, or under another schedule if 1F1B has not said.
    traced = [run for run in good.values() if run["trace"].get("costs")]
    reference = min(traced, key=lambda run: SCHEDULES.index(run["schedule"]), default=None)
    costs = reference["trace"]["costs"] if reference else []
    for run in plan.runs:
        if figures := good.get(run.name):
            figures["predicted_seconds"] = predicted_seconds(figures, costs)
            figures["virtual"] = stored_virtual(run, costs)
            if virtual and costs and not figures["virtual"]:
                figures["virtual"] = measure_virtual(plan, run, figures, costs)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "script": plan.script,
        "costs_from": reference and reference["label"],
        "verdict": verdict(good) if plan.short is None else short_verdict(good, plan.short),
        "notes": dict(notes or {}),
        "runs": runs,
    }


def _figures(run: Run) -> dict[str, Any]:
    """Return what is known of a run; ``state`` is ``done`` if it counts."""
    state = read_state(run)
    found = {
        "label": run.label,
        "schedule": run.schedule,
        "command": shlex.join(run.command),
        "added": shlex.join(run.added),
        **{key: state[key] for key in CONDITIONS if key in state},
    }
    # Where somebody else has started the run there is no state, and the record decides.
    if state.get("state", "done") != "done":
        error = state.get("error", f"{run.label} has not ended")
        return found | {"state": "failed", "error": error}
    try:
        figures = run_figures(read_records(run.record))
    except RecordError as error:
        return found | {"state": "failed", "error": str(error)}
    found |= figures | {"state": "done"}
    rate = figures["tokens_per_s"]
    per_iteration = figures["samples"][-1] / len(figures["samples"]) * figures["sequence_length"]
    found["measured_seconds"] = per_iteration / rate if rate else None
    found["trace"] = _trace(run, figures["counted_iterations"])
    return found | {"predicted_seconds": None, "virtual": {}}


def _trace(run: Run, skip: int) -> dict[str, Any]:
    if "--paci-trace" not in run.command:
        return {}
    try:
        return trace_figures(run.trace, skip=skip)
    except (TraceError, OSError) as error:
        return {"error": str(error)}


def write_report(report: dict[str, Any], plan: Plan, output: Path, *, title: str) -> list[Path]:
    """Write report.json, the pictures, report.md and report.html; return their paths.

    Raises:
        OSError: One cannot be written.
    """
    json_path = output / "report.json"
    json_path.write_text(to_json(report), encoding="utf-8")
    good = {name: run for name, run in report["runs"].items() if run["state"] == "done"}
    drawn = _draw(good, plan, output, title) if good else []
    blocks = content(report, drawn)
    written = [json_path, *(picture.path for picture in drawn)]
    for name, text in (("report.md", to_markdown(title, blocks)),
                       ("report.html", to_html(title, blocks))):
        (output / name).write_text(text, encoding="utf-8")
        written.append(output / name)
    return written


def _draw(
    runs: Mapping[str, Mapping[str, Any]], plan: Plan, output: Path, title: str
) -> list[Picture]:
    """Draw what the runs allow; older pictures go, so that none is taken for one of these."""
    for stale in ("loss", "throughput", "time", "timeline", "drift", "memory"):
        (output / f"{stale}.png").unlink(missing_ok=True)
    first = next(iter(runs.values()))
    subtitle = (f"{first['num_stages']} pipeline stages, m = {first['num_microbatches']} "
                f"microbatches, sequence {first['sequence_length']}, seed {first['seed']}, on "
                f"{first['device']}")
    found = [Picture(output / "loss.png", "Training loss against samples and against time")]
    plot_losses(runs, found[0].path, title=title, subtitle=subtitle)
    if timed := {name: run for name, run in runs.items() if run["tokens_per_s"]}:
        found.append(Picture(output / "throughput.png", "Throughput of each run"))
        pictures.draw_throughput(timed, found[-1].path)
    if traced := {name: run for name, run in runs.items() if run["trace"].get("costs")}:
        found.append(Picture(output / "time.png", "Where the time of each stage went"))
        pictures.draw_time_shares(traced, found[-1].path)
        panels = [
            timeline_panel(run.trace, title=run.label,
                           num_microbatches=traced[run.name]["num_microbatches"])
            for run in plan.runs if run.name in traced
            and traced[run.name]["num_stages"] == first["num_stages"]
        ]
        found.append(Picture(output / "timeline.png", "Time line of each run"))
        draw_panels(panels, [found[-1].path], unit="milliseconds")
    if drifting := {name: run for name, run in runs.items() if "drift_counts" in run}:
        found.append(Picture(output / "drift.png", "Drift of microbatches on each stage"))
        pictures.draw_drift(drifting, found[-1].path)
    found.append(Picture(output / "memory.png", "Memory of each stage"))
    pictures.draw_memory(runs, found[-1].path)
    return found
