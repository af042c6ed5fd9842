"""What a report says, in order: the verdict first, the exact commands last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_paci.compare.document import (
    Block,
    Heading,
    Items,
    Paragraph,
    Picture,
    Table,
    Verbatim,
)
from megatron_paci.compare.table import figure_rows, time_rows
from megatron_paci.trace import CAUSES

PICTURE_TEXTS = {
    "loss": ("Loss", "Faint lines are single iterations, bold ones a running mean. Time counts "
             "from the start of training, evaluations included."),
    "throughput": ("Throughput", "Without the first iterations, in which activations are counted; "
                   "evaluations and checkpoints in between are part of it. The dashed line is what "
                   "the schedule alone would make of it."),
    "time": ("Where time went", "Busy is a stage that computes a pass or an update. Idle time has "
             "the name of what the stage waited for."),
    "timeline": ("Time lines", "The same number of iterations of each run, over the same time. "
                 "Numbers are those of the microbatches; gaps are idle."),
    "drift": ("Drift", "Optimizer steps that a stage took between the forward and the backward of "
              "a microbatch."),
    "memory": ("Memory", "Counted by the run: weights, gradients, optimizer state, and the most "
               "that was kept for backward passes at a time."),
}


def content(report: Mapping[str, Any], drawn: Sequence[Picture]) -> list[Block]:
    """Return the blocks of a report (``report.collect``) with its pictures."""
    runs = report["runs"]
    good = {name: run for name, run in runs.items() if run["state"] == "done"}
    found = report["verdict"]
    blocks: list[Block] = [Paragraph(found["headline"], lead=True)]
    blocks += [Items(found["facts"])] * bool(found["facts"])
    if found["next"]:
        blocks += [Heading("What to try next", 3), Items(found["next"])]
    for run in runs.values():
        if run["state"] != "done":
            blocks += [Heading(f"Failed: {run['label']}"), Verbatim(run["error"])]
    if good:
        blocks += [Heading("Figures"), Table(figure_rows(good)), Heading("Time", 3),
                   Table(time_rows(good)), Paragraph(_times_text(report, good))]
    for picture in drawn:
        heading, text = PICTURE_TEXTS[picture.path.stem]
        blocks += [Heading(heading), Picture(picture.path, picture.text), Paragraph(text)]
        if picture.path.stem == "time":
            blocks.append(Table(_cause_rows(good)))
    blocks += _remarks(good)
    blocks.append(Heading("Commands"))
    for run in runs.values():
        blocks += [Heading(run["label"], 3),
                   Paragraph(f"Added to the common flags: {run['added']}"),
                   Verbatim(run["command"]), Paragraph(_conditions(run))]
    return [*blocks, Heading("Versions"), Items([
        *(f"{name} {version}" for name, version in _versions(report, good).items()),
        f"{report['platform']}, {report['cores']} cores, report of {report['date']}",
        *(f"{name}: {value}" for name, value in report["notes"].items()),
    ])]


def _times_text(report: Mapping[str, Any], runs: Mapping[str, Any]) -> str:
    text = ("Measured is wall-clock time of one run each: whatever else the machine did meanwhile "
            "is in it.")
    if report["costs_from"]:
        text += (f" The simulation takes the median times of passes and updates of "
                 f"{report['costs_from']} on each stage, the same for every schedule.")
    if any(run["virtual"].get("utilization") for run in runs.values()):
        text += (" Virtual time runs the very same script for a few iterations with logical "
                 "clocks: passes cost the same medians, messages and collectives only make ranks "
                 "wait for each other. It is exact and knows nothing of noise.")
    return text


def _cause_rows(runs: Mapping[str, Any]) -> list[list[str]]:
    columns = [
        (f"{run['label']}, stage {number}", stage)
        for run in runs.values()
        for number, stage in enumerate(run["trace"].get("seconds_by_cause", ()))
    ]
    shown = [cause for cause in CAUSES if any(stage[cause] > 0 for _, stage in columns)]
    return [
        ["share of the time", *(CAUSES[cause].split(" (")[0] for cause in shown)],
        *([name, *(f"{stage[cause] / (sum(stage.values()) or 1):.1%}" for cause in shown)]
          for name, stage in columns),
    ]


def _remarks(runs: Mapping[str, Any]) -> list[Block]:
    remarks = []
    for run in runs.values():
        if "error" in run["trace"]:
            remarks.append(f"{run['label']} has no time line: {run['trace']['error']}")
        if run["trace"].get("truncated"):
            ranks = ", ".join(map(str, run["trace"]["truncated"]))
            remarks.append(f"{run['label']}: the trace of rank {ranks} ends within a line; it "
                           "counts as far as it goes.")
        if "error" in run["virtual"]:
            remarks.append(f"{run['label']} was not measured in virtual time: "
                           f"{run['virtual']['error'].splitlines()[0]}")
    return [Heading("Left out"), Items(remarks)] if remarks else []


def _conditions(run: Mapping[str, Any]) -> str:
    if "started" not in run:
        return "Started by another launcher."
    loads = [run.get(f"load_{when}", "?") for when in ("before", "after")]
    return (f"Started {run['started']}, {run.get('run_seconds', 0):.0f} s in all; load average of "
            f"the machine {loads[0]} before and {loads[1]} after.")


def _versions(report: Mapping[str, Any], runs: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions that the runs had, else those here."""
    return next((run["versions"] for run in runs.values()), report["versions"])
