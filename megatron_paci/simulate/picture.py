"""Pictures of time lines, simulated or traced, as PNG or SVG.

matplotlib is imported only when one is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron_paci.plots import FAINT, INK
from megatron_paci.simulate.orders import Work
from megatron_paci.simulate.schedules import Plan
from megatron_paci.simulate.timing import Costs, Event, timeline

# Okabe and Ito's palette, which stays apart for every kind of colour vision; the hatches tell the
# passes apart without colour, too.
STYLES = {
    Work.FORWARD: ("#56B4E9", ""),
    Work.BACKWARD: ("#D55E00", "xxx"),
    Work.BACKWARD_INPUT: ("#E69F00", "..."),
    Work.BACKWARD_WEIGHT: ("#009E73", "///"),
    Work.STEP: ("#000000", ""),
}
MEANINGS = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward, both gradients",
    Work.BACKWARD_INPUT: "backward, gradient of the input",
    Work.BACKWARD_WEIGHT: "backward, gradient of the weights",
    Work.STEP: "optimizer step",
}
WIDTH = 1280  # pixels


@dataclass(frozen=True)
class Panel:
    """One time line of a picture."""

    title: str
    events: Sequence[Event]
    num_stages: int
    num_microbatches: int
    """Per iteration; microbatches are numbered within theirs."""


def draw_timelines(
    plans: Sequence[Plan], costs: Costs, paths: Sequence[Path | str], *, unit: str = "forwards"
) -> None:
    """Draw a time line of each plan; see ``draw_panels``."""
    draw_panels(
        [
            Panel(
                plan.label + (", drained at the end" if plan.drift else ""),
                timeline(plan.orders, plan.path, costs, joint_steps=plan.joint_steps),
                plan.num_stages,
                plan.num_microbatches,
            )
            for plan in plans
        ],
        paths,
        unit=unit,
    )


def draw_panels(
    panels: Sequence[Panel], paths: Sequence[Path | str], *, unit: str = "forwards"
) -> None:
    """Draw time lines one below the other, over the same time.

    The width is 1280 pixels; a second chunk is paler than the first. Numbers are those of
    microbatches within their iteration.

    Args:
        panels: At least one, all with the same stages.
        paths: Files to write, ``.png`` or ``.svg``.
        unit: What times are counted in, for the axis.

    Raises:
        OSError: A file cannot be written.
    """
    # Not pyplot, which keeps figures and a backend for the whole process.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    n = panels[0].num_stages
    end = float(max(event.end for panel in panels for event in panel.events))
    row = 0.24 if n <= 8 else 0.16
    pitch = n * row + 0.46
    height = len(panels) * pitch + 1.0
    # Without dates and random names, the same picture is the same file.
    with rc_context({"hatch.linewidth": 0.5, "svg.hashsalt": "megatron_paci"}):
        figure = Figure(figsize=(WIDTH / 100, height), dpi=100, facecolor="white")
        FigureCanvasAgg(figure)
        left, right = 0.075, 0.985
        scale = (right - left) * WIDTH / 1.02 / (end or 1)  # pixels per unit of time
        for number, panel in enumerate(panels):
            top = 1 - (0.36 + number * pitch) / height
            axes = figure.add_axes((left, top - n * row / height, right - left, n * row / height))
            _draw_panel(axes, panel, scale)
            axes.set_xlim(0, end * 1.02 or 1)
            axes.set_title(panel.title, loc="left", fontsize=11.5, fontweight="bold", color=INK)
            last = number == len(panels) - 1
            axes.tick_params(axis="x", labelbottom=last, colors=INK, labelsize=10, length=0)
            if last:
                axes.set_xlabel(f"time ({unit})", fontsize=11, color=INK)
        _legend(figure, [event for panel in panels for event in panel.events])
        for path in map(Path, paths):
            drawn = {"metadata": {"Date": None}} if path.suffix.lower() == ".svg" else {}
            figure.savefig(path, **drawn)


def _draw_panel(axes: Any, panel: Panel, scale: float) -> None:
    """Draw one time line, a row per stage."""
    n, m = panel.num_stages, panel.num_microbatches
    groups: dict[tuple[Work, int, int], list[tuple[float, float]]] = {}
    for event in panel.events:
        start, width = float(event.start), float(event.end - event.start)
        task = event.task
        if task.work is Work.STEP and not width:
            axes.plot(start, event.stage - 0.44, marker="v", color=STYLES[Work.STEP][0],
                      markersize=4.5, clip_on=False, zorder=4, markeredgewidth=0)
        if width:
            groups.setdefault((task.work, task.chunk, event.stage), []).append((start, width))
        label = str(task.index % m)
        if task.work is not Work.STEP and width * scale > 5 + 5.5 * len(label) and n <= 16:
            axes.text(start + width / 2, event.stage, label, fontsize=7.5, color="black",
                      ha="center", va="center", zorder=3,
                      bbox={"boxstyle": "square,pad=0.08", "facecolor": "white", "alpha": 0.75,
                            "linewidth": 0})
    for (work, chunk, stage), spans in groups.items():
        colour, hatch = STYLES[work]
        pixels = median(width for _, width in spans) * scale
        axes.broken_barh(
            spans, (stage - 0.43, 0.86), facecolor=colour, hatch=hatch if pixels > 12 else "",
            alpha=1 if chunk == 0 else max(0.35, 0.75 - 0.2 * chunk),
            edgecolor="white", linewidth=0.6 if pixels > 4 else 0,
        )
    axes.set_ylim(n - 0.5, -0.62)
    shown = range(0, n, 1 if n <= 16 else 4)
    axes.set_yticks(shown, [f"stage {stage}" for stage in shown], fontsize=9.5, color=INK)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _legend(figure: Any, events: Sequence[Event]) -> None:
    """Explain what is in the picture: bars, triangles for steps that take no time, pale chunks."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    bars = {event.task.work for event in events if event.end > event.start}
    for work, meaning in MEANINGS.items():
        colour, hatch = STYLES[work]
        if work in bars:
            handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=meaning))
        elif work is Work.STEP:
            handles.append(Line2D([], [], color=colour, marker="v", linewidth=0, label=meaning))
    if any(event.task.chunk for event in events):
        handles.append(Patch(facecolor=STYLES[Work.FORWARD][0], alpha=0.55, edgecolor="white",
                             label="pale: later chunk"))
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=9.5,
                  frameon=False, labelcolor=INK)
