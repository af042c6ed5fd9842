"""Pictures of training runs, as PNG files. matplotlib is imported only when one is drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_paci.simulate.schedules import LABELS

# Okabe and Ito's palette, which stays apart for every kind of colour vision. A schedule keeps its
# colour from picture to picture.
COLOURS = {"1f1b": "#0072B2", "paci": "#D55E00", "interleaved": "#009E73"}
OTHER_COLOURS = ("#CC79A7", "#E69F00", "#56B4E9")
INK, FAINT = "#222222", "#DDDDDD"


def plot_losses(
    runs: Mapping[str, Mapping[str, Any]], path: Path | str, *, title: str, subtitle: str = ""
) -> None:
    """Draw the training loss of runs against samples and against time, 1280 x 640 pixels.

    Faint lines are single iterations, bold ones a running mean; a dot at the end is the validation
    loss.

    Args:
        runs: By name, figures as ``compare.records.run_figures`` returns them: ``loss``,
            ``seconds`` and ``samples`` at the end of each iteration, ``valid_loss`` (or None); also
            ``label``, else the name tells the schedule. NaN and None in ``loss`` leave gaps.
        path: The PNG file to write.

    Raises:
        ValueError: There is no run, or one without iterations.
    """
    if not runs or not all(len(run["loss"]) for run in runs.values()):
        raise ValueError("nothing to plot: every run needs at least one iteration")
    # Not pyplot, which keeps figures and a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.8, 6.4), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=0.06, right=0.985, top=0.79, bottom=0.175, wspace=0.05)
    figure.text(0.06, 0.945, title, fontsize=17, fontweight="bold", color=INK, va="center")
    figure.text(0.06, 0.895, subtitle, fontsize=11.5, color="#555555", va="center")

    losses_at_end, ends, last_x = [], [], {left: 0, right: 0}
    colours = run_colours(runs)
    for name, run in runs.items():
        colour = colours[name]
        losses = [math.nan if value is None else value for value in run["loss"]]
        smooth = running_mean(losses, half_width=max(1, len(losses) // 40))
        valid = run.get("valid_loss")
        has_valid = valid is not None and math.isfinite(valid)
        for axes, x in ((left, run["samples"]), (right, run["seconds"])):
            last_x[axes] = max(last_x[axes], x[-1])
            axes.plot(x, losses, color=colour, alpha=0.25, linewidth=1)
            axes.plot(x, smooth, color=colour, linewidth=2.6, solid_capstyle="round",
                      label=run.get("label") or LABELS.get(name, name))
            if has_valid:
                axes.plot(x[-1:], [valid], "o", color=colour, markersize=8, zorder=5,
                          markeredgecolor="white", markeredgewidth=1)
        if has_valid:
            losses_at_end.append((run["samples"][-1], valid, colour))
        ends.append((run["seconds"][-1], valid if has_valid else smooth[-1], colour))

    for axes, label in ((left, "training samples"), (right, "training time (seconds)")):
        axes.set_xlabel(label, fontsize=12, color=INK)
        axes.set_xlim(0, last_x[axes] * 1.09)  # room for the numbers at the ends
        axes.grid(color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#999999")
        axes.tick_params(colors=INK, labelsize=11, length=0)
    left.set_ylabel("loss (nats per token)", fontsize=12, color=INK)
    left.set_title("by samples seen", fontsize=12, color=INK, loc="left", pad=9)
    right.set_title("by wall-clock time", fontsize=12, color=INK, loc="left", pad=9)
    low, high = left.get_ylim()
    left.set_ylim(low - 0.07 * (high - low), high)  # room for the times
    _write_losses(left, losses_at_end)
    _write_times(right, ends)
    _legend(figure, right, drew_valid=bool(losses_at_end))
    figure.savefig(path, format="png")


def run_colours(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return a colour for each run: that of its schedule, another one if that is taken."""
    others, found = itertools.cycle(OTHER_COLOURS), {}
    for name, run in runs.items():
        colour = COLOURS.get(run.get("schedule", name))
        found[name] = next(others) if colour is None or colour in found.values() else colour
    return found


def running_mean(values: Sequence[float], *, half_width: int) -> list[float]:
    """Return the centred running mean, over fewer values at the ends; NaN counts as missing.

    A value that is NaN itself stays NaN, so that a gap in the data is one in the curve.
    """
    means = []
    for i, value in enumerate(values):
        # At the start, where losses fall steeply, as many values on both sides, or the curve would
        # begin too low; at the end, where they fall no more, what is there.
        reach = min(half_width, i)
        near = [v for v in values[i - reach:i + reach + 1] if math.isfinite(v)]
        means.append(sum(near) / len(near) if near and math.isfinite(value) else math.nan)
    return means


def spread(positions: Sequence[float], *, gap: float) -> list[float]:
    """Return positions at least ``gap`` apart in the same order, moved as little as needed."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    # Neighbours that collide are stacked around their common centre, and collide anew as one.
    blocks: list[tuple[float, list[int]]] = []
    for i in order:
        centre, members = positions[i], [i]
        while blocks and centre - blocks[-1][0] < gap * (len(members) + len(blocks[-1][1])) / 2:
            before, earlier = blocks.pop()
            members = earlier + members
            centre = (before * len(earlier) + centre * (len(members) - len(earlier))) / len(members)
        blocks.append((centre, members))
    result = list(positions)
    for centre, members in blocks:
        for rank, i in enumerate(members):
            result[i] = centre + gap * (rank - (len(members) - 1) / 2)
    return result


def _write_losses(axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Write the loss of points (x, loss, colour) right of them, none over another."""
    low, high = axes.get_ylim()
    heights = spread([loss for _, loss, _ in points], gap=(high - low) * 0.05)
    for (x, loss, colour), height in zip(points, heights):
        axes.annotate(f"{loss:.2f}", (x, height), xytext=(9, 0), textcoords="offset points",
                      fontsize=12.5, fontweight="bold", color=colour, va="center")


def _write_times(axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Drop a line from points (seconds, loss, colour) and write the seconds at its foot."""
    (low, high), (left, right) = axes.get_ylim(), axes.get_xlim()
    places = spread([seconds for seconds, _, _ in points], gap=(right - left) * 0.105)
    beyond = max(0, max(places) - left - (right - left) * 0.955)
    for (seconds, loss, colour), place in zip(points, places):
        foot = low + 0.055 * (high - low)
        if math.isfinite(loss):
            axes.plot([seconds, seconds], [foot, loss], ":", color=colour, linewidth=1.6)
        axes.text(place - beyond, foot, f"{seconds:.0f} s", fontsize=12.5, fontweight="bold",
                  color=colour, ha="center", va="top")


def _legend(figure: Any, axes: Any, *, drew_valid: bool) -> None:
    """Explain the lines below the axes, where no curve can lie over it."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    handles.append(Line2D([], [], color="#888888", alpha=0.5, linewidth=1))
    labels.append("single iterations")
    if drew_valid:
        handles.append(Line2D([], [], color="#888888", marker="o", markersize=8, linewidth=0))
        labels.append("validation loss at the end")
    figure.legend(handles, labels, loc="lower center", ncols=min(len(labels), 6), fontsize=11,
                  frameon=False, labelcolor=INK, columnspacing=1.4)
