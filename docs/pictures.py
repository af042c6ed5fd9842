"""Draws the pictures in docs/images again. Run: python docs/pictures.py [NAME.png ...]

Three kinds: those that a page shows a ``simulate --picture docs/images/NAME.png`` command for;
``schedules.png`` and ``drift.png``, which are drawn here, from the same data that the engine runs;
and ``demo.png`` and ``trace-*.png``, which come from real runs (``make demo``, docs/trace.md) and
which this script leaves alone.
"""

from __future__ import annotations

import os
import sys
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pages

from megatron_paci.plots import FAINT, INK
from megatron_paci.schedule import Kind, StageSchedule
from megatron_paci.simulate.orders import Work
from megatron_paci.simulate.schedules import plan
from megatron_paci.simulate.timing import Costs, timeline

IMAGES = Path(__file__).with_name("images")
STAGES, MICROBATCHES, WINDOWS = 4, 4, 5
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"]  # by window; safe for most eyes
DRIFTS = ["#56B4E9", "#E69F00", "#D55E00", "#CC79A7"]
SHOWN_MICROBATCHES = 8


def simulated() -> dict[str, list[str]]:
    """Return, by file name, the command lines in the pages that draw into docs/images."""
    found = {}
    for page in pages.pages():
        for words in pages.simulations(page.read_text(encoding="utf-8")):
            if "--picture" in words:
                path = Path(words[words.index("--picture") + 1])
                if path.parent == Path("docs/images"):
                    found[path.name] = words
    return found


def new_figure(rows: int, height: float) -> tuple[Any, Any]:
    """Return a figure of 1280 pixels' width and its axes, one below the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, 1, figsize=(12.8, height), sharex=True, dpi=100)
    for axis in axes:
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    return figure, axes


def draw_schedules(path: Path) -> None:
    """Draw 1F1B and PACI: a forward takes one unit of time, a backward two, a message none."""
    runs = [("1F1B: the pipeline is emptied before every update", "1f1b"),
            ("PACI: it never is; every stage updates by itself", "paci")]
    figure, axes = new_figure(2, 5.2)
    end = 0.0
    for axis, (title, name) in zip(axes, runs):
        made = plan(name, STAGES, MICROBATCHES, iterations=WINDOWS)
        events = timeline(made.orders, made.path, Costs.equal(STAGES))
        passes = [event for event in events if event.task.work is not Work.STEP]
        for event in passes:
            stage, start, microbatch = event.stage, event.start, event.task.index
            window = microbatch // MICROBATCHES
            backward = event.task.work is Work.BACKWARD
            width = event.end - start
            axis.barh(stage, width, left=start, height=0.86, color=COLOURS[window % 5],
                      alpha=1.0 if backward else 0.55, edgecolor="white", linewidth=1.2)
            axis.text(start + width / 2, stage, str(microbatch % MICROBATCHES),
                      ha="center", va="center", fontsize=8, color="black")
            if backward and microbatch % MICROBATCHES == MICROBATCHES - 1:
                axis.plot(start + width, stage - 0.52, marker="v", color="black", markersize=5,
                          clip_on=False)
        last = max(event.end for event in passes)
        end = max(end, last)
        axis.axvline(last, color="black", linewidth=1, linestyle=":")
        axis.text(last + 0.4, 1.5, f"{last:.0f}", va="center", fontsize=11, weight="bold")
        axis.set_title(title, loc="left", fontsize=12, weight="bold", pad=10)
        axis.set_yticks(range(STAGES), [f"stage {stage}" for stage in range(STAGES)])
        axis.set_ylim(STAGES - 0.5, -0.75)
    axes[1].set_xlim(0, end + 3)
    axes[1].set_xlabel(
        f"time (forwards)    {WINDOWS} updates of {MICROBATCHES} microbatches on {STAGES} stages; "
        "pale: forward, full: backward, colour: update, triangle: optimizer step of that stage",
        fontsize=9.5,
    )
    figure.tight_layout()
    figure.savefig(path)


def draw_drift(path: Path) -> None:
    """Draw which updates lie between the forward and the backward of each microbatch of stage 0."""
    accumulations = (1, 2, 4)
    figure, axes = new_figure(len(accumulations), 7.4)
    for axis, a in zip(axes, accumulations):
        schedule = StageSchedule(0, STAGES, a)
        actions = chain.from_iterable(islice(schedule.ticks(), SHOWN_MICROBATCHES + STAGES - 1))
        forwards: dict[int, int] = {}
        place = version = 0
        for action in actions:
            if action.kind is Kind.STEP:
                version += 1
                axis.axvline(place, color=INK, linewidth=1, linestyle=":", zorder=3)
                axis.text(place, -1.0, f"v{version}", ha="center", fontsize=9, color=INK)
                continue
            if action.kind is Kind.FORWARD:
                forwards[action.microbatch] = place
            elif action.microbatch < SHOWN_MICROBATCHES:
                row, start = action.microbatch, forwards[action.microbatch]
                drift = schedule.drift(row)
                axis.barh(row, place + 1 - start, left=start, height=0.8, color=DRIFTS[drift],
                          edgecolor="white", zorder=2)
                for left, letter in ((start, "F"), (place, "B")):
                    axis.text(left + 0.5, row, letter, ha="center", va="center", fontsize=8.5)
                if place - start > 1:
                    axis.text((start + place + 1) / 2, row, f"drift {drift}", ha="center",
                              va="center", fontsize=8.5, zorder=4, bbox={
                                  "boxstyle": "square,pad=0.1", "facecolor": DRIFTS[drift],
                                  "linewidth": 0})
            place += 1
        axis.set_title(f"a = {a}: drift at most {schedule.drift_bound}", loc="left", fontsize=12,
                       weight="bold", pad=14, color=INK)
        axis.set_yticks(range(SHOWN_MICROBATCHES))
        axis.set_ylabel("microbatch", fontsize=10)
        axis.set_ylim(SHOWN_MICROBATCHES - 0.4, -0.6)
        axis.set_xlim(0, place)
        axis.set_xticks(range(0, place + 1, 2))
        axis.grid(axis="y", color=FAINT, linewidth=0.8)
        axis.set_axisbelow(True)
    axes[-1].set_xlabel(
        f"passes of stage 0 of {STAGES} in their order (a count, no time)    F: forward, "
        "B: backward, dotted line: update to version v1, v2, ...", fontsize=9.5)
    figure.tight_layout()
    figure.savefig(path)


DRAWN = {"schedules.png": draw_schedules, "drift.png": draw_drift}


def main(names: list[str]) -> None:
    """Draw the named pictures, or all."""
    os.chdir(pages.ROOT)
    commands = simulated()
    for name in names or [*DRAWN, *commands]:
        if name in DRAWN:
            DRAWN[name](IMAGES / name)
        elif pages.megatron_paci(commands[name]):
            raise SystemExit(f"{name}: its command failed")


if __name__ == "__main__":
    main(sys.argv[1:])
