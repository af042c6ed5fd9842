"""``python -m megatron_paci simulate`` with given times: its flags, its text and its record."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from megatron_paci.simulate.figures import (
    MOST_PASSES,
    Figures,
    Memory,
    measure,
    num_passes,
)
from megatron_paci.simulate.reading import Reader
from megatron_paci.simulate.schedules import ALIASES, NAMES, Plan, plan
from megatron_paci.simulate.text import number, table
from megatron_paci.simulate.timing import Costs

# Flags of a simulation with given times, and their help.
FLAGS = {
    "schedules": (
        "NAME[,NAME...]",
        f"schedules to compare (default: {','.join(NAMES)}); zb-2p is another name of zb-h2",
    ),
    "microbatches": ("M", "microbatches per iteration (required)"),
    "accum": ("A", "paci: backward passes per optimizer step; divides M (default: M)"),
    "extra-in-flight": (
        "S",
        "paci: also time it with S more microbatches in flight for each link between a stage and "
        "the last one, which hides latency (--paci-extra-in-flight; default: 0)",
    ),
    "forward": ("X[,X...]", "time of a forward pass, of all or of each stage (default: 1)"),
    "backward-input": (
        "X[,X...]",
        "time of the gradient of the input (default: 1). Schedules that do not split the backward "
        "take both times at once",
    ),
    "backward-weight": ("X[,X...]", "time of the gradient of the weights (default: 1)"),
    "step": ("X[,X...]", "time of an optimizer step (default: 0)"),
    "activation-memory": (
        "X[,X...]",
        "memory of the activations of one microbatch on a stage (default: 1)",
    ),
    "retained-memory": (
        "X[,X...]",
        "the part of it that is kept for the gradient of the weights when that of the input is "
        "there (default: half)",
    ),
    "static-memory": ("X[,X...]", "memory of weights, gradients and optimizer (default: 0)"),
    "iterations": ("K", "iterations to average over, at least (default: 8)"),
    "picture": ("FILE", "draw two iterations as time lines to FILE.png or .svg; may be repeated"),
}
REPEATED = "picture"
PICTURED_ITERATIONS = 2
MOST_PICTURED_STAGES = 64


@dataclass(frozen=True)
class Simulation:
    """What is timed."""

    schedules: Sequence[str]
    stages: int
    microbatches: int
    accum: int
    chunks: int
    extra_in_flight: int
    iterations: int
    costs: Costs
    memory: Memory

    def plans(self, iterations: int) -> dict[str, Plan]:
        """Return the schedules by name; PACI with more in flight is ``paci+S``."""
        return {name: make(iterations) for name, make in self.makers().items()}

    def makers(self) -> dict[str, Any]:
        """Return, by name, functions that make a plan for a number of iterations."""
        makers = {}
        for name in self.schedules:
            arguments = {"accumulation": self.accum, "chunks": self.chunks}
            make = partial(self._plan, name, **arguments)
            makers[name] = make
            if name == "paci" and self.extra_in_flight:
                makers[f"paci+{self.extra_in_flight}"] = partial(
                    make, extra_in_flight=self.extra_in_flight
                )
        return makers

    def _plan(self, name: str, iterations: int, **arguments: int) -> Plan:
        return plan(name, self.stages, self.microbatches, iterations=iterations, **arguments)

    def figures(self) -> tuple[dict[str, Figures], Figures]:
        """Return the figures of each schedule, and those of 1F1B to compare with."""
        found = {
            name: measure(make, self.costs, self.memory, iterations=self.iterations)
            for name, make in self.makers().items()
        }
        reference = found.get("1f1b") or measure(
            partial(self._plan, "1f1b"), self.costs, self.memory, iterations=1
        )
        return found, reference


def add_times_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for given times."""
    given = parser.add_argument_group("with given times")
    for name, (metavar, text) in FLAGS.items():
        action = {"action": "append"} if name == REPEATED else {}
        given.add_argument(f"--{name}", metavar=metavar, help=text, **action)


def run_times(options: argparse.Namespace, read: Reader) -> tuple[str, dict, Any] | None:
    """Return the text, the record and a function that draws; None if there are problems."""
    simulation, notes = _read(options, read)
    pictures = [
        path for text in options.picture or [] if (path := read.file(
            "picture", text, suffixes=(".png", ".svg")))
    ]
    if pictures and simulation.stages > MOST_PICTURED_STAGES:
        read.problems.append(f"--picture: has room for {MOST_PICTURED_STAGES} stages at most; "
                             "drop it, or give fewer --stages")
    if read.problems:
        return None
    figures, reference = simulation.figures()
    plans = simulation.plans(PICTURED_ITERATIONS)
    result = {
        "parameters": vars(simulation) | {
            "costs": vars(simulation.costs), "memory": vars(simulation.memory)
        },
        "schedules": {
            name: {
                "label": plans[name].label,
                **vars(found),
                "overall": found.overall,
                "bubble": found.bubble,
                "throughput_over_1f1b": _speed_up(found, reference),
            }
            for name, found in figures.items()
        },
    }
    text = _text(simulation, {name: plans[name].label for name in figures}, figures, reference)
    return text + "".join(f"{note}\n" for note in notes), result, partial(
        _draw, list(plans.values()), simulation.costs, pictures
    )


def _draw(plans: Sequence[Plan], costs: Costs, paths: Sequence[Path]) -> None:
    if paths:
        from megatron_paci.simulate.picture import draw_timelines

        draw_timelines(plans, costs, paths, unit="units of the given times")


def _read(options: argparse.Namespace, read: Reader) -> tuple[Simulation, list[str]]:
    """Return what the command line asks for, and notes on what is left out."""
    for flag in ("stages", "microbatches"):
        if getattr(options, flag) is None:
            read.problems.append(f"--{flag} is missing; give a whole number of 1 or more")
    n = read.whole("stages", options.stages, 2)
    m = read.whole("microbatches", options.microbatches, n)
    accum = read.whole("accum", options.accum, m)
    if m % accum:
        read.refuse("accum", accum, f"does not divide --microbatches {m}; take e.g. --accum {m}")
    chunks = read.whole("chunks", options.chunks, 2, least=2)
    schedules, notes = _read_schedules(options, read, n, m)
    one = Fraction(1)
    lists = [
        read.stages(flag, getattr(options, flag.replace("-", "_")), n, default)
        for flag, default in (("forward", one), ("backward-input", one), ("backward-weight", one),
                              ("step", Fraction(0)))
    ]
    if not any(map(sum, zip(*lists[:3]))):
        read.problems.append("--forward, --backward-input, --backward-weight: all are 0; give at "
                             "least one stage a pass that takes time")
    activations = read.stages("activation-memory", options.activation_memory, n, one)
    retained = read.stages("retained-memory", options.retained_memory, n, Fraction(-1))
    if options.retained_memory is None:
        retained = tuple(value / 2 for value in activations)
    if any(part > whole for part, whole in zip(retained, activations)):
        read.refuse("retained-memory", options.retained_memory,
                    "more than --activation-memory; give at most as much")
    static = read.stages("static-memory", options.static_memory, n, Fraction(0))
    iterations = read.whole("iterations", options.iterations, 8)
    extra = read.whole("extra-in-flight", options.extra_in_flight, 0, least=0)
    if num_passes(n, m, iterations, extra_in_flight=extra) > MOST_PASSES:
        read.problems.append(
            "--stages, --microbatches, --iterations, --extra-in-flight: too many passes to time; "
            "give smaller ones, e.g. --iterations 1"
        )
    simulation = Simulation(
        schedules, n, m, accum, chunks,
        extra_in_flight=extra,
        iterations=iterations,
        costs=Costs(*lists, latency=read.number("latency", options.latency, Fraction(0))),
        memory=Memory(activations, retained, static),
    )
    return simulation, notes


def _read_schedules(
    options: argparse.Namespace, read: Reader, n: int, m: int
) -> tuple[list[str], list[str]]:
    names = NAMES if options.schedules is None else options.schedules.split(",")
    names = list(dict.fromkeys(ALIASES.get(name.strip(), name.strip()) for name in names))
    for name in names:
        if name not in NAMES:
            read.refuse("schedules", name or "''", f"unknown; take some of {', '.join(NAMES)}")
    if "interleaved" not in names or (n > 1 and m % n == 0):
        return names, []
    reason = (
        "needs more than one stage; give e.g. --stages 2" if n == 1 else
        f"works in groups of as many microbatches as there are stages; give --microbatches as a "
        f"multiple of {n}"
    )
    if options.schedules is not None:
        read.refuse("schedules", "interleaved", reason)
    names.remove("interleaved")
    return names, [f"Left out: interleaved {reason}."]


def _text(
    simulation: Simulation, labels: Mapping[str, str], figures: Mapping[str, Figures],
    reference: Figures,
) -> str:
    """Return the tables for the terminal."""
    summary = [("schedule", "utilization", "bubble", "time per iteration", "throughput / 1F1B",
                "peak activations", "peak memory", "drift max")]
    for name, found in figures.items():
        summary.append((
            labels[name], f"{float(found.overall):.4f}", f"{float(found.bubble):.4f}",
            number(found.iteration_time), f"{float(_speed_up(found, reference)):.3f}",
            number(max(found.activations)), number(max(found.memory)), str(found.drift),
        ))
    stages = range(simulation.stages)
    per_stage = [
        (title, [("stage", *figures)] + [
            (str(stage), *(show(found, stage) for found in figures.values())) for stage in stages
        ])
        for title, show in (
            ("Utilization of each stage", lambda f, stage: f"{float(f.utilization[stage]):.4f}"),
            ("Peak activations on each stage", lambda f, stage: number(f.activations[stage])),
        )
    ]
    accum = f", PACI with a = {simulation.accum}" if "paci" in figures else ""
    n, m = simulation.stages, simulation.microbatches
    head = f"{n} stage{'s' * (n > 1)}, {m} microbatch{'es' * (m > 1)} per iteration"
    return "\n".join([
        f"{head}{accum}", "", table(summary),
        *(f"\n{title}\n{table(rows)}" for title, rows in per_stage), "",
    ])


def _speed_up(found: Figures, reference: Figures) -> Any:
    return reference.iteration_time / found.iteration_time
