"""The scenarios that most distributed tests consist of: pairs to compare, and replays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.gloo.launch import TINY_GPT, flags

TIED = TINY_GPT.replace(" --untie-embeddings-and-output-weights", "")
# Evaluating after every iteration drains after every iteration: with a window of all microbatches
# the stream is then Megatron's 1F1B. Clipping is off: its norm lags behind on all but one stage.
EVERY = "--eval-interval 1 --eval-iters 1 --clip-grad 0"
OVERLAPS = ("--overlap-grad-reduce", "--overlap-param-gather")


def variant_flags(extra_in_flight: int = 0, defer_step: bool = False) -> str:
    """Return the flags of a variation of the order."""
    return f"--paci-extra-in-flight {extra_in_flight}" + " --paci-defer-step" * defer_step


def drained_pair(name: str, num_stages: int, extra: str, base: str = TINY_GPT) -> dict[str, dict]:
    """Return ``stock-<name>`` without any hook and ``paci-<name>``, drained every window."""
    command = flags(num_stages, f"{EVERY} {extra}", base)
    return {
        f"stock-{name}": {"arguments": command, "plugin": False},
        f"paci-{name}": {"arguments": [*command, "--pipeline-schedule", "paci"]},
    }


def replay_of(
    initial: Path,
    extra: str,
    base: str = TINY_GPT,
    *,
    num_stages: int = 2,
    accumulation: int = 2,
    **rules: Any,
) -> dict:
    """Return the replay (replay.py) of the stream that has saved ``initial``.

    Overlapping changes no number, so the replay reduces and gathers late.
    """
    for flag in OVERLAPS:
        extra = extra.replace(flag, "")
    return {
        "arguments": flags(1, extra, base),
        "replay": {
            "num_stages": num_stages, "accumulation": accumulation, "initial": str(initial),
            **rules,
        },
    }


def local_run(
    initial: Path, base: str, *, extra: str, num_stages: int, phases: list, **rules: Any
) -> dict:
    """Return a run of the package's own runner (local_run.py) on the weights in ``initial``."""
    return {
        "arguments": flags(1, extra, base),
        "local": {
            "num_stages": num_stages, "phases": phases, "initial": str(initial), **rules,
        },
    }
