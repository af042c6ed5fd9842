"""Figures from the results of runs, as PNG files of 1280 x 560 pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from megatron_paci.convergence.clock import OVERHEADS, best_flush, times
from megatron_paci.convergence.experiments import EXPERIMENTS, Experiment
from megatron_paci.convergence.results import Results, final
from megatron_paci.convergence.settings import Settings
from megatron_paci.plots import COLOURS, FAINT, INK, OTHER_COLOURS

PALETTE = (COLOURS["1f1b"], COLOURS["paci"], COLOURS["interleaved"], *OTHER_COLOURS, "#000000")


def draw(results: Results, folder: Path, names: Iterable[str] = EXPERIMENTS) -> list[Path]:
    """Draw the figures of those of the named experiments that have results; return the files."""
    written = []
    for name in names:
        experiment, draw_one = EXPERIMENTS[name], FIGURES.get(name)
        if draw_one and any(results.of(experiment, label) for label in experiment.runs):
            path = folder / f"convergence-{name}.png"
            figure, axes = _figure(experiment.question)
            draw_one(axes, experiment, results)
            axes.legend(fontsize=11, frameon=False, labelcolor=INK)
            figure.savefig(path, metadata={"Software": None})
            written.append(path)
    return written


def _figure(title: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.8, 5.6), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.07, right=0.985, top=0.9, bottom=0.12)
    axes.set_title(title, fontsize=16, fontweight="bold", color=INK, loc="left")
    axes.set_ylabel("validation loss (nats per byte)", fontsize=12, color=INK)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=11, length=0)
    return figure, axes


def _over_samples(axes: Any, experiment: Experiment, results: Results) -> None:
    """Draw validation loss against samples, the mean over seeds."""
    _curves(axes, experiment, results, lambda label: [
        (iteration + 1) * experiment.runs[label].batch
        for iteration in range(experiment.runs[label].iterations)
    ])
    axes.set_xlabel("training samples", fontsize=12, color=INK)


def _over_time(axes: Any, experiment: Experiment, results: Results) -> None:
    """Draw validation loss against virtual time, 1F1B with its best microbatches."""
    overhead = OVERHEADS[1]

    def clock(label: str) -> list[float]:
        settings = experiment.runs[label]
        if settings.schedule == "sync":
            settings = best_flush(settings, overhead)
        return [float(time) for time in times(settings, overhead)]

    _curves(axes, experiment, results, clock)
    axes.set_xlabel(f"virtual time, overhead {overhead} of the batch per pass", fontsize=12,
                    color=INK)


def _curves(
    axes: Any, experiment: Experiment, results: Results, places: Callable[[str], list[float]]
) -> None:
    """Draw validation loss at ``places(label)[iteration - 1]``, after the first quarter."""
    for number, label in enumerate(experiment.runs):
        again, colour = divmod(number, len(PALETTE))
        runs = [run for run in results.of(experiment, label).values() if run["diverged"] is None]
        if not runs:
            continue
        x, measured = places(label), list(zip(*(run["validation"] for run in runs)))
        points = [(x[at[0][0] - 1], mean(loss for _, loss in at)) for at in measured]
        axes.plot(
            *zip(*points[len(points) // 4:]), "--" if again else "-", color=PALETTE[colour],
            linewidth=2.2, label=label,
        )


def _over_setting(name: str, *, log_base: int) -> Callable[[Any, Experiment, Results], None]:
    """Return what draws the final loss against a setting, a dot per seed, a line per schedule.

    1F1B is a level line where the setting is the number of stages: it counts nothing there. How
    many seeds diverged stands above the others.
    """

    def draw_one(axes: Any, experiment: Experiment, results: Results) -> None:
        colours = iter(PALETTE)
        groups: dict[str, dict[float, tuple[list[float], int]]] = {}
        for label, settings in experiment.runs.items():
            runs = results.of(experiment, label).values()
            losses = [final(run) for run in runs if run["diverged"] is None]
            if losses and name == "stages" and settings.schedule == "sync":
                axes.axhline(mean(losses), color=next(colours), linewidth=2.2, label=label)
            elif runs:
                group = groups.setdefault(_schedule(settings), {})
                group[getattr(settings, name)] = losses, len(runs)
        for line, (label, points) in enumerate(groups.items()):
            colour = next(colours)
            means = [(x, mean(losses)) for x, (losses, _) in sorted(points.items()) if losses]
            axes.plot(*zip(*means), color=colour, linewidth=2.2, label=label)
            for x, (losses, count) in points.items():
                axes.plot([x] * len(losses), losses, "o", color=colour, markersize=5)
                if len(losses) < count:
                    axes.margins(y=0.25)  # space for these
                    axes.annotate(
                        f"{count - len(losses)} of {count} diverged", (x, 0.97 - line / 20),
                        xycoords=axes.get_xaxis_transform(), ha="right", va="top", color=colour,
                        fontsize=11,
                    )
        axes.set_xscale("log", base=log_base)
        values = sorted({x for points in groups.values() for x in points})
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xlabel(name.replace("lr", "learning rate"), fontsize=12, color=INK)

    return draw_one


def _schedule(settings: Settings) -> str:
    return "1F1B" if settings.schedule == "sync" else f"PACI a={settings.schedule}"


FIGURES: dict[str, Callable[[Any, Experiment, Results], None]] = {
    "accumulation": _over_samples,
    "rate": _over_setting("lr", log_base=2),
    "depth": _over_setting("stages", log_base=2),
    "stability": _over_setting("lr", log_base=2),
    "time": _over_time,
    "time_longer": _over_time,
    "time_longest": _over_time,
    "time_adam": _over_time,
    "recipe": _over_samples,
}
