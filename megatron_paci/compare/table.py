"""The figures of several runs side by side. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_paci.compare.records import FINAL_ITERATIONS

Figures = Mapping[str, Any]
Rows = list[tuple[str, ...]]


def figure_rows(runs: Mapping[str, Figures]) -> Rows:
    """Return a header and one row per figure, with a cell per run, ``-`` where there is none."""
    num_stages = max(len(run["bytes"]) for run in runs.values())
    rows = [
        ("", *(run["label"] for run in runs.values())),
        (f"training loss (nats/token, mean of the last {FINAL_ITERATIONS} iterations)",
         *(_number(run["final_loss"], ".3f") for run in runs.values())),
        ("validation loss (nats/token)",
         *(_number(run["valid_loss"], ".3f") for run in runs.values())),
        ("test loss (nats/token)",
         *(_number(run["test_loss"], ".3f") for run in runs.values())),
        ("throughput (tokens/s)",
         *(_number(run["tokens_per_s"], ",.0f") for run in runs.values())),
    ]
    stage_rows: list[tuple[str, Callable[[Figures, int], str]]] = [
        ("drift reached / bound (optimizer steps)", _drift),
        ("most microbatches in flight", lambda run, stage: str(run["in_flight_max"][stage])
         if "in_flight_max" in run else "-"),
        ("parameters (MB)", _megabytes("parameters")),
        ("activations kept for backward, peak (MB)", _megabytes("activations_peak")),
        ("GPU memory allocated, peak (MB)", _megabytes("device_allocated_peak")),
    ]
    for title, cell in stage_rows:
        rows += [
            (f"{title}, stage {stage}", *(cell(run, stage) for run in runs.values()))
            for stage in range(num_stages)
        ]
    return _without_empty(rows)


def time_rows(runs: Mapping[str, Figures]) -> Rows:
    """Return the same of where time went: per iteration, and busy on each stage."""
    rows = [
        ("", *(run["label"] for run in runs.values())),
        ("seconds per iteration, measured",
         *(_number(run["measured_seconds"], ".4f") for run in runs.values())),
        ("seconds per iteration, simulated",
         *(_number(run["predicted_seconds"], ".4f") for run in runs.values())),
        ("seconds per iteration, virtual time",
         *(_number(run["virtual"].get("seconds_per_iteration"), ".4f") for run in runs.values())),
    ]
    for title, part in (("measured", "trace"), ("virtual time", "virtual")):
        for stage in range(max(run["num_stages"] for run in runs.values())):
            rows.append((f"busy, {title}, stage {stage}", *(
                _share(run[part].get("utilization"), stage) for run in runs.values()
            )))
    rows.append(("collectives over stages per iteration, virtual time", *(
        _number(run["virtual"].get("cross_stage_collectives"), "g") for run in runs.values()
    )))
    return _without_empty(rows)


def comparison_table(runs: Mapping[str, Figures]) -> str:
    """Return the figures as a table for the terminal."""
    rows = figure_rows(runs)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(
            cell.rjust(max(width, 10)) for cell, width in zip(row[1:], widths[1:])
        )]).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def speedup(runs: Mapping[str, Figures]) -> dict[str, float | None]:
    """Return PACI's throughput over 1F1B's: ``measured`` (None if unknown) and ``theory``.

    1F1B is busy for m of m + N - 1 slots of an iteration, PACI always.
    """
    rates = {run["schedule"]: run["tokens_per_s"] for run in reversed(runs.values())}
    one, other = rates.get("paci"), rates.get("1f1b")
    run = next(iter(runs.values()))
    m, n = run["num_microbatches"], run["num_stages"]
    return {"measured": one / other if one and other else None, "theory": (m + n - 1) / m}


def speedup_text(runs: Mapping[str, Figures], *, cores: int) -> str:
    """Return what one has to know to read the throughputs: theory, and how they were measured."""
    found, run = speedup(runs), next(iter(runs.values()))
    if found["measured"] is None:
        return "PACI / 1F1B in tokens/s: not measured"
    text = (
        f"PACI / 1F1B in tokens/s: {found['measured']:.2f} measured, "
        f"{found['theory']:.2f} at most in theory,\n(m+N-1)/m for "
        f"N = {run['num_stages']} stages of equal cost and m = {run['num_microbatches']} "
        "microbatches. One run each: whatever\nelse the machine did meanwhile is in the times."
    )
    if found["measured"] > 1.03 * found["theory"]:
        text += "\nMore than theory allows: something else has slowed 1F1B's run. Measure again."
    if run["device"] == "cpu" and cores < run["num_stages"]:
        text += (
            f"\nThe {run['num_stages']} stages share {cores} core{'s' * (cores > 1)}: there is no "
            "idle time for PACI to fill."
        )
    return text


def _without_empty(rows: Rows) -> Rows:
    """Leave out rows that say nothing, but those that everybody looks for."""
    kept = ("validation loss", "throughput", "drift", "most microbatches")
    return rows[:1] + [
        row for row in rows[1:] if row[0].startswith(kept) or any(cell != "-" for cell in row[1:])
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _share(values: list[float] | None, stage: int) -> str:
    return f"{values[stage]:.1%}" if values and stage < len(values) else "-"


def _drift(run: Figures, stage: int) -> str:
    if "drift_max" not in run:
        return "-"
    return f"{run['drift_max'][stage]} / {run['drift_bound'][stage]}"


def _megabytes(key: str) -> Callable[[Figures, int], str]:
    def cell(run: Figures, stage: int) -> str:
        found = run["bytes"][stage].get(key) if stage < len(run["bytes"]) else None
        return "-" if found is None else f"{found / 1e6:.1f}"

    return cell
