"""Draws docs/images/schedules.png: 1F1B and PACI as time lines. Run: python docs/pictures.py

Both are timed from the same data that the engine runs: a forward takes one unit of time, a backward
two, a message none; a pass starts as soon as its stage is free and its input is there.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_paci.simulate.orders import Work  # noqa: E402
from megatron_paci.simulate.schedules import plan  # noqa: E402
from megatron_paci.simulate.timing import Costs, timeline  # noqa: E402

STAGES, MICROBATCHES, WINDOWS = 4, 4, 5
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"]  # by window; safe for most eyes


def draw(path: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [("1F1B: the pipeline is emptied before every update", "1f1b"),
            ("PACI: it never is; every stage updates by itself", "paci")]
    figure, axes = plt.subplots(2, 1, figsize=(12.8, 5.2), sharex=True, dpi=100)
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
        for side in ("top", "right", "left", "bottom"):
            axis.spines[side].set_visible(False)
        axis.tick_params(length=0)
    axes[1].set_xlim(0, end + 3)
    axes[1].set_xlabel(
        f"time (forwards)    {WINDOWS} updates of {MICROBATCHES} microbatches on {STAGES} stages; "
        "pale: forward, full: backward, colour: update, triangle: optimizer step of that stage",
        fontsize=9.5,
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    draw(Path(__file__).with_name("images") / "schedules.png")
