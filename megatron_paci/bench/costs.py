"""What passes and steps cost in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Costs:
    """Virtual time per stage, of a whole stage: a model chunk out of v costs 1/v of it."""

    forward: tuple[Fraction, ...]
    backward: tuple[Fraction, ...]
    step: tuple[Fraction, ...]

    @classmethod
    def parse(
        cls, *, num_stages: int, forward: str = "1", backward: str = "2", step: str = "0"
    ) -> Costs:
        """Read costs as they are written on a command line (``per_stage``)."""
        return cls(*(per_stage(text, num_stages) for text in (forward, backward, step)))


def per_stage(text: str, num_stages: int) -> tuple[Fraction, ...]:
    """Read one number for all stages, or one for each, separated by commas.

    Numbers are exact: decimals and quotients such as ``1/3`` are kept as fractions.

    Raises:
        ValueError: It is not that, or a number is negative.
    """
    values = tuple(time(part) for part in text.split(","))
    if len(values) not in (1, num_stages):
        raise ValueError(f"{len(values)} numbers for {num_stages} stages; give one, or one each")
    return values if len(values) == num_stages else values * num_stages


def time(text: str) -> Fraction:
    """Read one number, at least 0."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{text!r} is not a number; give e.g. 1, 0.5 or 1/3") from None
    if value < 0:
        raise ValueError(f"{text} is negative; give 0 or more")
    return value
