"""Pictures of a comparison, as PNG files, 1280 pixels wide.

matplotlib is imported only when one is drawn. Runs keep their colours (plots.py); parts of a bar
have those of Okabe and Ito, with hatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_paci.plots import FAINT, INK, run_colours
from megatron_paci.trace import CAUSES

Figures = Mapping[str, Any]
Part = tuple[str, str, str, Callable[[Any], float]]
"""Label, colour, hatch, and the value of a part of a stacked bar."""

CAUSE_STYLES = {
    "F": ("#56B4E9", ""),
    "B": ("#D55E00", ""),
    "step": ("#000000", ""),
    "fill": ("#F0E442", "///"),
    "drain": ("#F0E442", "\\\\\\"),
    "input": ("#E69F00", ""),
    "gradient": ("#CC79A7", ""),
    "report": ("#0072B2", "..."),
    "message": ("#E69F00", "///"),
    "settle": ("#0072B2", "xxx"),
    "evaluate": ("#009E73", ""),
    "checkpoint": ("#009E73", "///"),
    "other": ("#BBBBBB", ""),
}
MEMORY_PARTS = {
    "parameters": ("parameters", "#0072B2", ""),
    "gradients": ("gradients", "#E69F00", ""),
    "optimizer": ("optimizer state", "#009E73", ""),
    "activations_peak": ("activations kept for backward, peak", "#CC79A7", ""),
}


def draw_throughput(runs: Mapping[str, Figures], path: Path) -> None:
    """Draw tokens per second of each run; a line where the simulator sees it."""
    measured = {name: run["tokens_per_s"] or 0 for name, run in runs.items()}
    reference = next((run for run in runs.values()
                      if run["predicted_seconds"] and run["measured_seconds"]), None)
    figure, axes = _figure(max(2.4, 1.3 + 0.55 * len(runs)), left=0.2)
    places = range(len(runs))
    axes.barh(places, list(measured.values()), height=0.62,
              color=list(run_colours(runs).values()))
    most = max(measured.values()) or 1
    for place, run in enumerate(runs.values()):
        if reference and run["predicted_seconds"]:
            expected = (reference["tokens_per_s"] * reference["predicted_seconds"]
                        / run["predicted_seconds"])
            most = max(most, expected)
            axes.plot([expected] * 2, [place - 0.4, place + 0.4], color=INK, linewidth=2.2,
                      linestyle=(0, (2, 1)), label=f"{reference['label']} as measured, times what "
                      "the simulator gains on it" if run is reference else None)
    axes.set_xlim(0, most * 1.05)
    labels = [f"{run['label']}\n{rate:,.0f}" for run, rate in zip(runs.values(), measured.values())]
    _finish(figure, axes, labels, "throughput (tokens per second)")
    if axes.get_legend_handles_labels()[0]:
        _legend(figure, axes, columns=1)
    figure.savefig(path, format="png")


def draw_time_shares(runs: Mapping[str, Figures], path: Path) -> None:
    """Draw for every stage of every run which share of its time went where."""
    shown = [cause for cause in CAUSES if any(
        stage[cause] > 0.0005 * sum(stage.values())
        for run in runs.values() for stage in run["trace"]["seconds_by_cause"]
    )]

    def part(cause: str) -> Part:
        colour, hatch = CAUSE_STYLES[cause]
        return (CAUSES[cause].split(" (")[0], colour, hatch,
                lambda stage: 100 * stage[cause] / (sum(stage.values()) or 1))

    _stacked(
        {run["label"]: run["trace"]["seconds_by_cause"] for run in runs.values()},
        [part(cause) for cause in shown], path, "share of the time (percent)", full=100,
        notes={run["label"]: [f"{busy:.0%} busy" for busy in run["trace"]["utilization"]]
               for run in runs.values()},
    )


def draw_memory(runs: Mapping[str, Figures], path: Path) -> None:
    """Draw the memory of every stage of every run; on a GPU with the peak that it counted."""
    parts: list[Part] = [
        (label, colour, hatch, lambda stage, key=key: stage[key] / 1e6)
        for key, (label, colour, hatch) in MEMORY_PARTS.items()
    ]
    stages = {run["label"]: run["bytes"] for run in runs.values()}
    _stacked(stages, parts, path, "memory of the fullest rank of a stage (MB)", notes={
        label: [_memory_note(stage) for stage in each] for label, each in stages.items()
    })


def _memory_note(stage: Mapping[str, int]) -> str:
    known = sum(stage[key] for key in MEMORY_PARTS) / 1e6
    peak = stage.get("device_allocated_peak")
    return f"{known:,.1f}" + (f"; GPU peak {peak / 1e6:,.1f}" if peak else "")


def draw_drift(runs: Mapping[str, Figures], path: Path) -> None:
    """Draw, for the runs under PACI, the share of microbatches with each drift, per stage."""
    counts = {run["label"]: run["drift_counts"] for run in runs.values()}
    most = max(int(drift) for stages in counts.values() for each in stages for drift in each)
    palette = ("#56B4E9", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#F0E442")
    hatches = ("", "///", "...", "xxx")

    def part(drift: int) -> Part:
        return (f"drift {drift}", palette[drift % len(palette)], hatches[drift % len(hatches)],
                lambda stage: 100 * stage.get(str(drift), 0) / (sum(stage.values()) or 1))

    _stacked(counts, [part(drift) for drift in range(most + 1)], path,
             "share of microbatches (percent)", full=100)


def _stacked(
    stages: Mapping[str, Sequence[Any]], parts: Sequence[Part], path: Path, unit: str, *,
    full: float | None = None, notes: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Draw one horizontal bar per stage, runs one below the other, parts side by side."""
    count = sum(map(len, stages.values()))
    rows = -(-len(parts) // 4)
    figure, axes = _figure(1.1 + 0.3 * count + 0.22 * len(stages) + 0.24 * rows, left=0.2,
                           bottom=0.62 + 0.24 * rows)
    ticks, labels, place = [], [], 0.0
    longest = max(sum(value(stage) for *_, value in parts) for each in stages.values()
                  for stage in each) or 1
    drawn: set[str] = set()
    for label, each in stages.items():
        for number, stage in enumerate(each):
            start = 0.0
            for name, colour, hatch, value in parts:
                width = value(stage)
                axes.barh(place, width, left=start, height=0.82, color=colour, hatch=hatch,
                          edgecolor="white", linewidth=0.5,
                          label=None if name in drawn else name)
                drawn.add(name)
                start += width
            if notes:
                axes.text(start + 0.008 * longest, place, notes[label][number], va="center",
                          fontsize=10.5, color=INK)
            ticks.append(place)
            labels.append(f"{label}, stage {number}")
            place += 1
        place += 0.7
    axes.set_yticks(ticks)
    axes.set_xlim(0, (full or longest) * (1.12 if full else 1.22))
    if full:
        axes.set_xticks([0, 20, 40, 60, 80, 100])
    _finish(figure, axes, labels, unit, ticks=ticks)
    _legend(figure, axes, columns=4)
    figure.savefig(path, format="png")


def _figure(height: float, *, left: float, bottom: float = 0.95) -> tuple[Any, Any]:
    """Return a figure of 1280 pixels and ``height`` inches; ``bottom`` inches are left free."""
    # Not pyplot, which keeps figures and a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.8, height + 0.4), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    low = bottom / (height + 0.4)
    return figure, figure.add_axes((left, low, 0.985 - left, 1 - low - 0.12 / (height + 0.4)))


def _finish(
    figure: Any, axes: Any, labels: Sequence[str], unit: str, ticks: Sequence[float] | None = None
) -> None:
    axes.set_yticks(range(len(labels)) if ticks is None else ticks, labels, fontsize=11, color=INK)
    axes.invert_yaxis()
    axes.set_xlabel(unit, fontsize=11.5, color=INK)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
    axes.tick_params(colors=INK, labelsize=11, length=0)


def _legend(figure: Any, axes: Any, *, columns: int) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="lower center", ncols=columns,
                  fontsize=10.5, frameon=False, labelcolor=INK)
