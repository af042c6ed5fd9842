"""Does PACI suit this model? What the figures of a comparison say, and how sure that is. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_paci.compare.records import FINAL_ITERATIONS

Figures = Mapping[str, Any]
LEAST_GAIN = 1.03
MORE_THAN_EXPLAINED = 1.1
LEAST_ITERATIONS = 100
MANY_MICROBATCHES = 8  # per stage: 1F1B then idles for less than 1/8 of the time


def verdict(runs: Mapping[str, Figures]) -> dict[str, Any]:
    """Return ``headline``, ``facts`` and ``next``, sentences on the runs that ended well.

    The fastest of Megatron's own schedules is what PACI is compared with; of several runs under
    PACI the headline is about the one with the lowest loss when the first of all runs has ended.
    """
    own = [run for run in runs.values() if run["schedule"] != "paci" and run["tokens_per_s"]]
    paci = [run for run in runs.values() if run["schedule"] == "paci" and run["tokens_per_s"]]
    if not own or not paci:
        lacking = "PACI" if not paci else "Megatron's own schedules"
        return {"headline": f"No verdict: no run under {lacking} has ended well and was long "
                            "enough to be timed.", "facts": [], "next": []}
    base = max(own, key=lambda run: run["tokens_per_s"])
    compared = [compare(run, base) for run in paci]
    best = min(compared, key=lambda each: _last_if_unknown(each["loss_at_equal_time"][0]))
    facts = [text for each in compared for text in _facts(each, base)]
    facts += [_speed(compare(run, base), base) for run in own if run is not base]
    facts += _busy_machine([*own, *paci])
    facts.append("One seed and one run each: what another seed, or the rest of the machine, would "
                 "change is not known from this.")
    return {
        "headline": _headline(best, base),
        "facts": facts,
        "next": _next(best, base),
        "base": base["label"],
        "compared": {each["label"]: {k: v for k, v in each.items() if k != "run"}
                     for each in compared},
    }


def compare(run: Figures, base: Figures) -> dict[str, Any]:
    """Return the figures of one run against another.

    ``speedup`` in tokens/s and as ``predicted`` and in ``virtual`` time (None if unknown);
    ``loss_difference`` at equal samples, mean of the last iterations, with ``noise``, twice the
    standard error of that mean (None if the runs had other batches); ``loss_at_equal_time`` of
    both, when the shorter run ended, and those ``seconds``; the same by the simulator's clock as
    ``loss_at_equal_simulated_time`` (None if there is none); ``memory`` of the fullest stage as a
    ratio; ``diverged``.
    """
    difference, noise = _loss_difference(run, base)
    seconds = min(run["seconds"][-1], base["seconds"][-1])
    return {
        "label": run["label"],
        "run": run,
        "speedup": run["tokens_per_s"] / base["tokens_per_s"],
        "predicted": _ratio(base["predicted_seconds"], run["predicted_seconds"]),
        "virtual": _ratio(base["virtual"].get("seconds_per_iteration"),
                          run["virtual"].get("seconds_per_iteration")),
        "loss_difference": difference,
        "noise": noise,
        "seconds": seconds,
        "loss_at_equal_time": [loss_at(each, seconds) for each in (run, base)],
        "loss_at_equal_simulated_time": _by_simulated_clock(run, base),
        "memory": fullest(run) / fullest(base),
        "diverged": not math.isfinite(_finite(run["final_loss"])),
    }


def _by_simulated_clock(run: Figures, base: Figures) -> list[float | None] | None:
    if not (run["predicted_seconds"] and base["predicted_seconds"]):
        return None
    clocked = [
        each | {"seconds": [(i + 1) * each["predicted_seconds"] for i in range(len(each["loss"]))]}
        for each in (run, base)
    ]
    end = min(each["seconds"][-1] for each in clocked)
    return [loss_at(each, end) for each in clocked]


def loss_at(run: Figures, seconds: float) -> float | None:
    """Return the mean loss of the last iterations that had ended by then, None if none had."""
    ended = sum(end <= seconds for end in run["seconds"])
    last = [_finite(loss) for loss in run["loss"][max(0, ended - FINAL_ITERATIONS):ended]]
    return statistics.fmean(last) if last else None


def fullest(run: Figures) -> float:
    """Return the bytes of the fullest stage: as the GPU counts them, else those that are known."""
    parts = ("parameters", "gradients", "optimizer", "activations_peak")
    return max(
        stage.get("device_allocated_peak") or sum(stage[part] for part in parts)
        for stage in run["bytes"]
    )


def _loss_difference(run: Figures, base: Figures) -> tuple[float | None, float | None]:
    if run["samples"] != base["samples"]:
        return None, None
    count = min(len(run["loss"]), max(FINAL_ITERATIONS, len(run["loss"]) // 10))
    pairs = zip(run["loss"][-count:], base["loss"][-count:])
    differences = [_finite(one) - _finite(other) for one, other in pairs]
    if not all(map(math.isfinite, differences)):
        return None, None
    # Both runs saw the same samples, so what these do to the loss cancels out.
    deviation = statistics.stdev(differences) if count > 1 else math.inf
    return statistics.fmean(differences), 2 * deviation / math.sqrt(count)


def _headline(best: Mapping[str, Any], base: Figures) -> str:
    gain = f"{best['speedup']:.2f} times the throughput of {base['label']}"
    name, difference, noise = best["label"], best["loss_difference"], best["noise"]
    own, others = best["loss_at_equal_time"]
    when = "at equal time"
    if best["diverged"]:
        return f"{name} does not suit this training as it is: its loss is not a number any more."
    if len(best["run"]["loss"]) < LEAST_ITERATIONS:
        return (f"No verdict: {len(best['run']['loss'])} iterations are too few for one. So far "
                f"{name} has {gain}.")
    predicted = best["predicted"]
    if best["speedup"] < LEAST_GAIN:
        if predicted and predicted >= LEAST_GAIN:
            return (f"{name} was not faster here: {gain}, although its schedule allows "
                    f"{predicted:.2f}. Something else than the schedule decides; find it before "
                    "you judge.")
        return f"{name} does not pay here: {gain}."
    if predicted and best["speedup"] > MORE_THAN_EXPLAINED * predicted:
        gain += f" (the schedules explain {predicted:.2f}; the rest is not theirs)"
        own, others = best["loss_at_equal_simulated_time"]
        when = "at equal simulated time"
    if difference is None or own is None or others is None:
        return f"{name} has {gain}; the losses cannot be compared at equal samples."
    if difference <= noise:
        return (f"{name} suits this model as far as one seed tells: {gain}, and no loss at equal "
                "samples that this comparison could see.")
    if own < others:
        return (f"{name} is worth a longer trial: {gain}; {when} its loss is "
                f"{others - own:.3f} lower, at equal samples {difference:.3f} higher.")
    return (f"{name} does not pay here: {gain}, but its loss is higher even {when} "
            f"({own:.3f} against {others:.3f}).")


def _facts(each: Mapping[str, Any], base: Figures) -> list[str]:
    run = each["run"]
    facts = [_speed(each, base)]
    if each["loss_difference"] is not None:
        higher = "higher" if each["loss_difference"] > 0 else "lower"
        clear = "" if abs(each["loss_difference"]) > each["noise"] else ", which is within it"
        facts.append(
            f"Loss at equal samples: {abs(each['loss_difference']):.4f} {higher} over the last "
            f"iterations; noise from iteration to iteration {each['noise']:.4f}{clear}."
        )
    own, others = each["loss_at_equal_time"]
    if own is not None and others is not None:
        facts.append(
            f"Loss at equal time (after {each['seconds']:.1f} s): {own:.4f} against "
            f"{others:.4f}. The slower run was then still at an earlier point of its learning "
            "rate schedule."
        )
    own, others = each["loss_at_equal_simulated_time"] or (None, None)
    if own is not None and others is not None:
        facts.append(f"By the simulator's clock, without the noise of the machine: {own:.4f} "
                     f"against {others:.4f}.")
    if run.get("drift_max"):
        facts.append(f"Drift: at most {max(run['drift_max'])} optimizer steps between a forward "
                     f"and its backward (bound {max(run['drift_bound'])}).")
    facts.append(f"Memory of the fullest stage: {each['memory']:.2f} times that of "
                 f"{base['label']}.")
    return facts


def _speed(each: Mapping[str, Any], base: Figures) -> str:
    speed = [f"{each['speedup']:.2f} measured"]
    if each["predicted"] is not None:
        speed.append(f"{each['predicted']:.2f} simulated with the measured times of passes")
    if each["virtual"] is not None:
        speed.append(f"{each['virtual']:.2f} in virtual time")
    return f"{each['label']}, throughput over {base['label']}: {', '.join(speed)}."


def _busy_machine(runs: Sequence[Figures]) -> list[str]:
    """Say whether others kept the cores busy; a run before may have left a load of one's own."""
    loads = {run["label"]: run["load_before"] for run in runs if run["device"] == "cpu"
             and run.get("load_before", 0) > run.get("cores", 0) + 1}
    if not loads:
        return []
    label = max(loads, key=lambda each: loads[each])
    return [f"The machine was busy with something else (load average {loads[label]} when {label} "
            "began): measured times say little, the simulated ones more."]


def _next(best: Mapping[str, Any], base: Figures) -> list[str]:
    run = best["run"]
    n, m, a = run["num_stages"], run["num_microbatches"], run["accumulation"]
    found = []
    if best["diverged"] or (best["loss_difference"] or 0) > (best["noise"] or 0):
        found.append(
            f"A larger --accum than {a}, or a lower learning rate: the delay costs less then."
            if a < m else "More microbatches per iteration, or a lower learning rate: the delay "
            "costs less then."
        )
    if n > 1 and a < n - 1:
        found.append(f"--accum {n - 1} or more: gradients are then one update old at most.")
    if m >= MANY_MICROBATCHES * n:
        found.append(f"1F1B as it is: with {m} microbatches on {n} stages it has hardly a bubble.")
    predicted = best["predicted"]
    if predicted and best["speedup"] > MORE_THAN_EXPLAINED * predicted:
        found.append("Measure again on a quiet machine: more was gained than the schedules "
                     "explain.")
    elif predicted and best["speedup"] < 0.95 * predicted:
        found.append("Look at the time line and at idle time by cause: less was gained than the "
                     "schedules allow.")
    busy = base["trace"].get("costs")
    if busy:
        found += _balance([cost["forward"] + cost["backward"] for cost in busy])
    if len(run["loss"]) < 10 * LEAST_ITERATIONS:
        found.append("A longer training: early losses say little about late ones.")
    found.append("Another --seed, to see how much of the difference in loss is chance.")
    return found


def _balance(costs: Sequence[float]) -> list[str]:
    slowest, mean = max(costs), statistics.fmean(costs)
    if slowest <= 1.15 * mean:
        return []
    return [f"Other numbers of layers per stage: stage {costs.index(slowest)} takes "
            f"{slowest / mean:.2f} times the average, and under PACI all wait for it."]


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def _finite(value: float | None) -> float:
    return math.nan if value is None else value


def _last_if_unknown(value: float | None) -> float:
    return math.inf if value is None or not math.isfinite(value) else value
