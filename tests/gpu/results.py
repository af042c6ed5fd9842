"""What came out of a run of the GPU check, as rows and as Markdown: pure, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.gpu.plan import SPEED_MICROBATCHES, WARM_UP, Check

EXACT = ("losses", "evaluations", "weights", "optimizer")


@dataclass(frozen=True)
class Row:
    """The outcome of a check, or of a scenario that failed."""

    name: str
    outcome: str
    """passed, failed, skipped, or a figure: measured."""
    detail: str = ""


def rows_of(
    checks: Iterable[Check],
    outcomes: Mapping[str, dict[str, Any]],
    *,
    device: str,
    num_gpus: int,
) -> list[Row]:
    """Return one row per check, and before them one per scenario that failed or was refused.

    Args:
        outcomes: By name of the scenario: ``ranks``, one result per rank, or why there are none:
            ``failed``, ``skipped`` or, of a backend, ``refused``.
        device: cuda or cpu.
        num_gpus: How many there are for the ranks.
    """
    rows = []
    for name, outcome in outcomes.items():
        if "failed" in outcome:
            rows.append(Row(name, "failed", outcome["failed"].splitlines()[0]))
        elif "refused" in outcome:
            rows.append(Row(name, "skipped", outcome["refused"]))
    return rows + [_row(check, outcomes, device, num_gpus) for check in checks]


def _row(check: Check, outcomes: Mapping[str, dict[str, Any]], device: str, num_gpus: int) -> Row:
    pair = {
        name: outcomes.get(name, {"failed": "not run"}) for name in (check.left, check.right)
    }
    for name, outcome in pair.items():
        if "failed" in outcome:
            return Row(check.name, "failed", f"{name} failed")
    for outcome in pair.values():
        if "skipped" in outcome:
            return Row(check.name, "skipped", outcome["skipped"])
    left, right = (outcome["ranks"] for outcome in pair.values())
    if check.kind == "memory":
        return _memory(check.name, left, right, device)
    if check.kind == "speed":
        return _speed(check.name, left, right, device, shared=num_gpus < len(left))
    if check.kind == "delay":
        return _delay(check.name, left, right)
    difference = first_difference(left, right)
    return Row(check.name, "failed" if difference else "passed", difference)


def first_difference(left: list[dict], right: list[dict]) -> str:
    """Return where two runs differ first, empty if they are equal to the last bit."""
    for rank, (one, other) in enumerate(zip(left, right, strict=True)):
        for key in EXACT:
            if one[key] == other[key]:
                continue
            if isinstance(one[key], str):
                return f"rank {rank}: {key}"
            pairs = enumerate(zip(one[key], other[key]))
            place = next((n for n, (a, b) in pairs if a != b), "length")
            return f"rank {rank}: {key}[{place}]"
    return ""


def _delay(name: str, drained: list[dict], stream: list[dict]) -> Row:
    """Drift of every stage, in optimizer steps; and whether it has changed the losses."""
    none = [rank["statistics"]["drift_max"] for rank in drained]
    some = [rank["statistics"]["drift_max"] for rank in stream]
    bounds = [rank["statistics"]["drift_bound"] for rank in stream]
    detail = f"drift by stage: drained {none}, undrained {some}, bound {bounds}"
    right = not any(none) and some == bounds and some[0] > 0
    changed = drained[-1]["losses"] != stream[-1]["losses"]
    return Row(name, "passed" if right and changed else "failed", detail)


def _memory(name: str, left: list[dict], right: list[dict], device: str) -> Row:
    """Peak bytes of every stage; a second copy of its weights would be a failure."""
    if device == "cpu":
        return Row(name, "skipped", "needs CUDA")
    ratios, copies = [], []
    for rank, (stock, paci) in enumerate(zip(left, right)):
        ratios.append(f"{paci['peak'] / stock['peak']:.3f}")
        if paci["peak"] - stock["peak"] >= stock["parameters"]:
            copies.append(str(rank))
    detail = f"peak over that of 1F1B by stage: {', '.join(ratios)}"
    if copies:
        stages = ", ".join(copies)
        return Row(name, "failed", f"{detail}; above it by a copy of the weights on {stages}")
    return Row(name, "passed", detail)


def tokens_per_second(ranks: list[dict]) -> float:
    """Return the speed after the first iterations, up to the last but one, where PACI drains."""
    last = ranks[-1]  # the stage with the loss, which it waits for in every iteration
    ends = last["ends"]
    return (len(ends) - 1 - WARM_UP) * last["tokens"] / (ends[-2] - ends[WARM_UP - 1])


def _speed(
    name: str, left: list[dict], right: list[dict], device: str, *, shared: bool
) -> Row:
    stock, paci = tokens_per_second(left), tokens_per_second(right)
    stages, microbatches = len(left), SPEED_MICROBATCHES
    theory = (microbatches + stages - 1) / microbatches
    detail = (
        f"{paci:,.0f} tokens/s, 1F1B {stock:,.0f}: ratio {paci / stock:.2f}, "
        f"{theory:.2f} where every stage has a GPU to itself"
    )
    if device == "cpu":
        return Row(name, "measured", f"{detail}; on a CPU this says nothing")
    return Row(name, "measured", f"{detail}; says little, the ranks share GPUs" if shared
               else detail)


def markdown(
    rows: Iterable[Row], facts: Mapping[str, Any], outcomes: Mapping[str, dict[str, Any]]
) -> str:
    """Return the report: what it ran on, checks, seconds of every scenario, and failures in full.
    """
    lines = ["# GPU check", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| check | outcome | detail |", "| --- | --- | --- |"]
    lines += [f"| {row.name} | {row.outcome} | {_cell(row.detail)} |" for row in rows]
    lines += ["", "| scenario | seconds |", "| --- | --- |"]
    for name, outcome in outcomes.items():
        if "skipped" not in outcome:
            lines.append(f"| {name} | {outcome['seconds']:.1f} |")
    for name, outcome in outcomes.items():
        if "failed" in outcome:
            lines += ["", f"## {name}", "", "```", outcome["failed"], "```"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
