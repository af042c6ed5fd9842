"""What the warning of loss_watch.py would have said of the runs there are: where it is set."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_paci.convergence.experiments import EXPERIMENTS
from megatron_paci.convergence.results import Results, final
from megatron_paci.loss_watch import LossWatch

BEHIND = 0.3
"""A run is far behind if its validation loss ends so many nats above that of its 1F1B."""
NEAR, FAR, SGD, DIVERGED = OUTCOMES = (
    f"end less than {BEHIND} nats behind 1F1B", "end farther behind", "have SGD", "diverge",
)
"""SGD by itself: it trains so badly here that its 1F1B would be told of, too."""


def watch(result: Mapping[str, Any]) -> tuple[LossWatch, set[str]]:
    """Return a watch that has seen a run, and what it told of.

    A stored loss is the mean over a few iterations and is taken for each of them.
    """
    found, told, number = LossWatch(), set(), 0
    for loss in result["losses"]:
        for _ in range(result["iterations_per_loss"]):
            number += 1
            if (finding := found.add(number, loss)) is not None:
                told.add(finding.what)
    return found, told


def outcomes(results: Results) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the results of all experiments, each once, with one of ``OUTCOMES``."""
    found = {}
    for experiment in EXPERIMENTS.values():
        for label, settings in experiment.seeded():
            result = results.get(settings)
            compared = results.of(experiment, experiment.baseline(label)).get(settings.seed)
            if result is None or compared is None:
                continue
            found[json.dumps(asdict(settings))] = _outcome(result, compared), result
    return list(found.values())


def _outcome(result: Mapping[str, Any], compared: Mapping[str, Any]) -> str:
    if result["diverged"] is not None:
        return DIVERGED
    if result["settings"]["optimizer"] == "sgd":
        return SGD
    # Not a number, where 1F1B has diverged, is no lead.
    return FAR if final(result) - final(compared) > BEHIND else NEAR


def _share(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else "-"  # no run had so many iterations


def watch_rows(results: Results) -> list[tuple[str, ...]]:
    """Return a row for each outcome: runs, largest rise, least fall, runs told of."""
    found: dict[str, list[tuple[LossWatch, set[str]]]] = {}
    for name, result in outcomes(results):
        found.setdefault(name, []).append(watch(result))
    return [
        (name, str(len(runs)), f"{max(each.largest for each, _ in runs):.1%}",
         _share(min(each.least_fall for each, _ in runs)),
         *(f"{sum(what in told for _, told in runs)} of {len(runs)}"
           for what in ("risen", "stuck")))
        for name in OUTCOMES if (runs := found.get(name))
    ]
