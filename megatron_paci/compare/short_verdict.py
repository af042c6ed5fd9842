"""Do the loss curves part? What a short comparison has found, in sentences. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_paci.compare.gap import BLOCKS, LEAST_ITERATIONS, Gap, gap, gap_over_seeds
from megatron_paci.compare.short import Short
from megatron_paci.delay import REMEDY

Figures = Mapping[str, Any]
Pair = tuple[Figures, Figures]
"""A run under PACI and that under 1F1B with the same seed."""


def short_verdict(runs: Mapping[str, Figures], short: Short) -> dict[str, Any]:
    """Return ``headline``, ``facts`` and ``next``, sentences on the runs that ended well.

    The headline has one sentence for each accumulation of PACI; ``gaps`` has its numbers.
    """
    bases = {run["seed"]: run for run in runs.values() if run["schedule"] == "1f1b"}
    pairs: dict[int, list[Pair]] = {}
    for run in runs.values():
        if run["schedule"] == "paci" and run["seed"] in bases:
            pairs.setdefault(run["accumulation"], []).append((run, bases[run["seed"]]))
    if not pairs:
        return {"headline": "No verdict: no run under 1F1B and one under PACI with the same seed "
                            "have ended well.", "facts": [], "next": []}
    sentences, facts, suggestions, gaps = [], [], [], {}
    for accumulation, found in pairs.items():
        name = f"PACI (a={accumulation})"
        different = _different(found)
        if len(different) < len(found):
            facts.append(f"{name}: some seeds gave the very same losses, so they count as one: the "
                         "seed changes nothing where weights come from a checkpoint and the order "
                         "of the data does not depend on it.")
        if diverged := _diverged(name, different):
            sentences.append(diverged)
            suggestions.append(_remedy())
            continue
        if problem := _problem(name, different):
            sentences.append(problem)
            continue
        measured = _measure(different)
        gaps[name] = vars(measured) | {"parts": measured.parts, "moves": measured.moves}
        sentences.append(_sentence(name, measured, short))
        facts += _facts(name, measured, different[0], short)
        suggestions += _next(measured)
    return {"headline": " ".join(sentences), "facts": [*dict.fromkeys(facts), *_left_out(short)],
            "next": list(dict.fromkeys(suggestions)), "gaps": gaps}


def _different(pairs: Sequence[Pair]) -> list[Pair]:
    """Leave out pairs in which 1F1B has the losses of an earlier pair."""
    found: list[Pair] = []
    for pair in pairs:
        if all(pair[1]["loss"] != other[1]["loss"] for other in found):
            found.append(pair)
    return found


def _diverged(name: str, pairs: Sequence[Pair]) -> str | None:
    """Say whose loss is not a number any more, None if all are."""
    for side, label in ((1, "1F1B"), (0, name)):
        ends = [end for pair in pairs if (end := _first_not_finite(pair[side]["loss"])) is not None]
        if ends:
            which = f" under {len(ends)} of {len(pairs)} seeds" if len(pairs) > 1 else ""
            return (f"{label} does not train here: its loss is not a number any more from "
                    f"iteration {min(ends)} of the run on{which}.")
    return None


def _problem(name: str, pairs: Sequence[Pair]) -> str | None:
    """Return what else keeps the losses from being compared, None if nothing does."""
    for run, base in pairs:
        count = min(len(run["loss"]), len(base["loss"]))
        if count < LEAST_ITERATIONS:
            return (f"No verdict on {name}: {count} iterations are too few for one, give "
                    f"{LEAST_ITERATIONS} or more.")
        if run["samples"][:count] != base["samples"][:count]:
            return f"No verdict on {name}: its iterations had other numbers of samples than 1F1B's."
    return None


def _first_not_finite(losses: Sequence[float]) -> int | None:
    for number, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            return number
    return None


def _measure(pairs: Sequence[Pair]) -> Gap:
    losses = [(run["loss"], base["loss"]) for run, base in pairs]
    return gap(*losses[0]) if len(losses) == 1 else gap_over_seeds(losses)


def _sentence(name: str, found: Gap, short: Short) -> str:
    over = f"{found.seeds} seeds" if found.seeds > 1 else f"{BLOCKS} blocks of {found.block}"
    first, last = (short.done + number for number in found.counted)
    where = f"95%, iterations {first} to {last}, {over}, the same samples in both"
    side = "above" if found.level > 0 else "below"
    if found.parts:
        text = (f"The loss curves part: {name} is {abs(found.level):.4f} ± {found.level_error:.4f} "
                f"{side} 1F1B ({where})")
    else:
        text = (f"No difference seen: {name} is {abs(found.level):.4f} ± {found.level_error:.4f} "
                f"{side} 1F1B ({where}); one of {2 * found.level_error:.4f} would have been seen")
    if found.moves and found.parts:
        verb = "grows" if found.trend * found.level > 0 else "shrinks"
        text += (f"; the gap {verb} by {abs(found.trend):.4f} ± {found.trend_error:.4f} in 100 "
                 "iterations")
    elif found.moves:
        verb = "rises" if found.trend > 0 else "falls"
        text += (f"; but the difference {verb} by {abs(found.trend):.4f} ± "
                 f"{found.trend_error:.4f} in 100 iterations")
    return f"{text}."


def _facts(name: str, found: Gap, pair: Pair, short: Short) -> list[str]:
    run, base = pair
    quarters = ", ".join(f"{value:+.4f}" for value in found.quarters)
    facts = [f"{name} less 1F1B, by quarter of the run: {quarters} (nats)."]
    done = min(len(run["loss"]), len(base["loss"]))
    if done < short.iterations:
        facts.append(f"{name}: only {done} of {short.iterations} iterations have been done by both "
                     "runs.")
    if found.correlation is not None:
        wider = math.sqrt((1 + found.correlation) / (1 - found.correlation))
        facts.append(f"{name}: neighbouring blocks correlate by {found.correlation:.2f}, which "
                     f"makes the interval {wider:.2f} times as wide.")
        facts.append("One run of each: the interval is about chance from iteration to iteration. "
                     "What another seed would change is not known from this; --seeds 3 tells.")
    if run.get("drift_max"):
        facts.append(f"{name}: at most {max(run['drift_max'])} optimizer steps between a forward "
                     f"and its backward (bound {max(run['drift_bound'])}).")
    return facts


def _next(found: Gap) -> list[str]:
    if found.parts and found.level > 0:
        return [_remedy()]
    if found.moves and found.trend > 0:
        return ["More --iterations: the difference is on the way up."]
    return ["A longer training, and what PACI gains in time: compare without --short."]


def _remedy() -> str:
    return f"If that is too much: {REMEDY}."


def _left_out(short: Short) -> list[str]:
    if not short.taken_out:
        return []
    return [f"Left out of the script's flags, so that nothing is written to its folders and all "
            f"runs end together: {' '.join(short.taken_out)}"]
