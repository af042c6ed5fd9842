"""A short comparison of two loss curves: how many iterations, from where, with which seeds. Pure.

``--exit-interval E`` ends Megatron after the first iteration whose number is a multiple of E. Runs
that go on from iteration S and are to do n more get E = S + n, which no earlier one of them is a
multiple of. All else that decides what is learned stays as the user has it: with ``--train-iters``
unchanged so do the learning rate, the weight decay and the order of the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PAIR = ("1f1b", "paci")
ITERATIONS = 300
TAKEN_OUT = (
    "--save", "--non-persistent-save-interval", "--non-persistent-ckpt-type", "--exit-interval",
    "--exit-duration-in-mins",
)
"""Flags of the script that write checkpoints, load another one than ``--load`` says, or end a run
at another iteration. Each has a value."""
TRACKER = "latest_checkpointed_iteration.txt"
DEFAULT_SEED = 1234  # Megatron's


@dataclass(frozen=True, kw_only=True)
class Short:
    """What a short comparison does."""

    iterations: int
    done: int
    """Iterations that were done when the checkpoint was written that all runs start from."""
    seeds: list[int]
    """A pair of runs for each."""
    taken_out: list[str]
    """What was left out of the script's flags."""

    @property
    def last(self) -> int:
        """The number of the last iteration."""
        return self.done + self.iterations


def make_short(
    arguments: Sequence[str], *, iterations: int = ITERATIONS, num_seeds: int = 1
) -> tuple[Short, list[str]]:
    """Return what to do, and the script's arguments for it.

    Args:
        arguments: Of the script, as the user has given them.
        num_seeds: Pairs of runs: with the script's own seed and with those that follow.

    Raises:
        ValueError: ``--seed`` is no number, or there is no checkpoint where one is to be loaded.
    """
    kept, taken_out = take_out(arguments, TAKEN_OUT)
    text = last_value(kept, "--seed") or str(DEFAULT_SEED)
    if not text.isdecimal():
        raise ValueError(f"--seed {text}: not a whole number")
    load = last_value(kept, "--load")
    done = iterations_done(
        load=load,
        step=last_value(kept, "--ckpt-step"),
        override=last_value(kept, "--override-ckpt-iteration"),
        pretrained=last_value(kept, "--pretrained-checkpoint"),
        finetune="--finetune" in kept,
    )
    seeds = [int(text) + number for number in range(num_seeds)]
    short = Short(iterations=iterations, done=done, seeds=seeds, taken_out=taken_out)
    return short, [*kept, "--exit-interval", str(short.last),
                   *["--exit-on-missing-checkpoint"] * (load is not None)]


def iterations_done(
    *,
    load: str | None,
    step: str | int | None = None,
    override: str | int | None = None,
    pretrained: str | None = None,
    finetune: bool = False,
) -> int:
    """Return the iteration from which Megatron goes on with these flags, 0 without a checkpoint.

    Args:
        load: Folder of checkpoints, from ``--load``.
        step: Which of them, from ``--ckpt-step``; the last one if None.
        override: What its iteration is to be instead, from ``--override-ckpt-iteration``.
        pretrained: Folder that Megatron takes if ``load`` has none.
        finetune: Whether counting starts anew.

    Raises:
        ValueError: There is no checkpoint; Megatron would start from random weights.
    """
    if load is None and pretrained is None:
        return 0
    if load is None or not (Path(load) / TRACKER).is_file():
        if pretrained is not None and (Path(pretrained) / TRACKER).is_file():
            return 0  # Megatron then counts anew, as with --finetune
        folder = load or pretrained
        raise ValueError(
            f"{'--load' if load else '--pretrained-checkpoint'} {folder}: holds no checkpoint (no "
            f"{TRACKER}), so Megatron would start from random weights; give the folder of one, or "
            "drop the flag"
        )
    text = str(step) if step else (Path(load) / TRACKER).read_text().strip()
    if text != "release" and not text.isdecimal():
        raise ValueError(f"--load {load}: {TRACKER} says {text!r}, which is no iteration")
    if step and not (Path(load) / f"iter_{int(text):07d}").is_dir():
        raise ValueError(f"--ckpt-step {step}: {load} has no checkpoint of that iteration")
    if finetune or text == "release":
        return 0
    return int(override or text)


def take_out(arguments: Sequence[str], flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without ``flags``, which have a value each, and what was left out."""
    kept: list[str] = []
    left_out: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag not in flags:
            kept.append(word)
        else:
            left_out += [word] if equals else [word, next(words, "")]
    return kept, left_out


def last_value(arguments: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag, of a repeated one the last; None if it is not there."""
    found = None
    for word, following in zip(arguments, [*arguments[1:], ""]):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found
