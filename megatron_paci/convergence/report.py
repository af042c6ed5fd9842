"""Tables from the results of runs, for docs/convergence.md."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from statistics import mean, stdev
from typing import Any

from megatron_paci.convergence.clock import OVERHEADS, best_flush, first_below, times
from megatron_paci.convergence.experiments import EXPERIMENTS, Experiment
from megatron_paci.convergence.figures import FIGURES
from megatron_paci.convergence.results import Results, final, final_training
from megatron_paci.convergence.settings import Settings
from megatron_paci.convergence.watch import watch_rows
from megatron_paci.student import interval

TIMES = ("time", "time_longer", "time_longest", "time_adam")
"""Experiments with a second table, of times."""
TABLE = re.compile(
    r"(<!-- table (\w+): python docs/convergence\.py --report -->\n)(.*?)(<!-- end of table -->\n)",
    re.DOTALL,
)


def table(experiment: Experiment, results: Results) -> str:
    """Return the table of an experiment: losses, and differences to the baseline seed by seed."""
    rows = []
    for label in experiment.runs:
        runs = results.of(experiment, label)
        if not runs:
            continue
        baseline = experiment.baseline(label)
        compared = results.of(experiment, baseline)
        whole = {seed: run for seed, run in runs.items() if run["diverged"] is None}
        losses = [final(run) for run in whole.values()]
        differences = [
            final(run) - final(compared[seed])
            for seed, run in whole.items()
            if seed in compared and compared[seed]["diverged"] is None
        ]
        rows.append((
            label,
            _spread(losses),
            "" if label == baseline or not differences else _difference(differences),
            _spread([final_training(run) for run in whole.values()]),
            f"{mean(run['deviation'] for run in whole.values()):.4f}" if whole else "",
            str(max(run["drift_max"] for run in runs.values())),
            f"{len(runs) - len(whole)} of {len(runs)}",
        ))
    if not rows:
        return f"Not run yet: `python docs/convergence.py {experiment.name}`\n"
    head = ("run", "validation loss", "difference to 1F1B", "training loss",
            "deviation of the training loss", "largest drift", "diverged")
    return _rows(head, rows)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def _difference(values: Sequence[float]) -> str:
    middle, half = interval(values)
    return f"{middle:+.4f}" + ("" if math.isnan(half) else f" ± {half:.4f}")


def time_table(experiment: Experiment, results: Results) -> str:
    """Return how much sooner each run reaches the final loss of the best 1F1B, in virtual time.

    The best 1F1B is that with the lower final loss; its microbatches have the best size.
    """
    flushes = [label for label, settings in experiment.runs.items() if settings.schedule == "sync"]
    complete = [label for label in flushes if results.of(experiment, label)]
    if not complete:
        return f"Not run yet: `python docs/convergence.py {experiment.name}`\n"
    best = min(complete, key=lambda label: mean(map(final, results.of(experiment, label).values())))
    rows = []
    for label, settings in experiment.runs.items():
        runs = results.of(experiment, label)
        if not runs or settings.schedule == "sync":
            continue
        for part in (Fraction(1), Fraction(3, 4), Fraction(1, 2)):
            rows.append((label, f"{float(part):.0%}", *(
                _speedup(experiment, results, label, best, part, overhead)
                for overhead in OVERHEADS
            )))
    head = ("run", f"loss of {best} after", *(f"overhead {o}" for o in OVERHEADS))
    return _rows(head, rows)


def _speedup(
    experiment: Experiment, results: Results, label: str, best: str, part: Fraction,
    overhead: Fraction,
) -> str:
    """Return the ratio of the times to a loss, over seeds."""
    settings, flush = experiment.runs[label], best_flush(experiment.runs[best], overhead)
    clock, flush_clock = times(settings, overhead), times(flush, overhead)
    ratios = []
    compared = results.of(experiment, best)
    for seed, run in results.of(experiment, label).items():
        if seed not in compared:
            continue
        measured = compared[seed]["validation"]
        iteration, loss = measured[int(part * len(measured)) - 1]
        reached = first_below(run["validation"], loss, clock)
        if reached is not None:
            ratios.append(float(flush_clock[iteration - 1]) / reached)
    lost = len(compared) - len(ratios)
    note = f" ({lost} of {len(compared)} never)" if lost else ""
    against = f", m={flush.num_microbatches}"
    if not ratios:
        return f"not reached{against}"
    return f"{mean(ratios):.2f}" + (
        f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    ) + against + note


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |\n" for line in (head, *rows)]
    return lines[0] + "| --- " * len(head) + "|\n" + "".join(lines[1:])


def repeated(experiment: Experiment, again: Results, kept: Results) -> str:
    """Return a line on how far runs that were made again are from those kept."""
    pairs = [
        (run, before)
        for settings in (settings for _, settings in experiment.seeded())
        if (run := again.get(settings)) and (before := kept.get(settings))
    ]
    others = [pair for pair in pairs if not _same(*pair)]
    apart = [abs(final(run) - final(before)) for run, before in others]
    ended = [each for each in apart if not math.isnan(each)]
    return (
        f"{len(pairs)} of {len(experiment.seeded())} runs are done again; "
        f"{len(pairs) - len(others)} with all losses as kept"
        + (f", the validation losses of the others end at most {max(ended):.5f} apart"
           if ended else "")
        + (f"; {len(apart) - len(ended)} diverged here or there alone" if ended != apart else "")
    )


def _same(run: dict[str, Any], before: dict[str, Any]) -> bool:
    # As text, for the last loss of a run that has diverged may be no number.
    return all(json.dumps(run[name]) == json.dumps(before[name])
               for name in ("losses", "validation", "diverged"))


def settings_table() -> str:
    """Return the settings that runs have unless their label says otherwise."""
    import dataclasses

    from megatron_paci.convergence.runs import flush

    base = flush()
    return _rows(("setting", "value"), [
        (f"`{each.name}`", f"`{getattr(base, each.name)}`") for each in dataclasses.fields(Settings)
        if each.name not in ("schedule", "microbatch", "seed")
    ])


def made_with(results: Results) -> str:
    """Return what all results there are were made with: versions and the text."""
    found: dict[tuple[str, ...], list[float]] = {}
    for path in sorted(results.folder.glob("*.json")):
        result = json.loads(path.read_text())
        versions, text = result["versions"], result["text"]
        kind = (*(f"{name} {version}" for name, version in versions.items()),
                f"text {text['train']}, {text['validation']}")
        found.setdefault(kind, []).append(result["core_seconds"])
    rows = [(", ".join(kind), str(len(seconds)), f"{sum(seconds) / 3600:.1f}")
            for kind, seconds in found.items()]
    return _rows(("made with", "runs", "core hours"), rows) if rows else "No runs yet.\n"


def watch_table(results: Results) -> str:
    """Return how far the loss rose and fell in all runs, and what the runtime warning tells."""
    head = ("runs that", "runs", "largest rise", "least fall", "told that it rises",
            "told that it hardly falls")
    rows = watch_rows(results)
    return _rows(head, rows) if rows else "No runs yet.\n"


def tables(results: Results) -> dict[str, str]:
    """Return all tables by name."""
    found = {"settings": settings_table(), "made_with": made_with(results),
             "watch": watch_table(results)}
    for name, experiment in EXPERIMENTS.items():
        found[name] = table(experiment, results)
        if name in FIGURES and any(results.of(experiment, label) for label in experiment.runs):
            found[name] += f"\n![{experiment.question}](images/convergence-{name}.png)\n"
    for name in TIMES:
        found[f"{name}_ratio"] = time_table(EXPERIMENTS[name], results)
    return found


def renewed(text: str, results: Results) -> str:
    """Return a page with its tables made anew."""
    made = tables(results)
    return TABLE.sub(lambda found: found[1] + made[found[2]] + found[4], text)
