"""What formulas say of schedules on equal stages, without latency and without optimizer steps."""

from __future__ import annotations

from fractions import Fraction

SCHEDULES = ("1f1b", "interleaved", "paci")


def utilization(
    schedule: str, num_stages: int, num_microbatches: int, *, chunks: int = 2
) -> Fraction:
    """Return the share of the time in which a stage computes, in the steady state.

    Args:
        schedule: One of ``SCHEDULES``.
        chunks: Interleaved: model chunks per stage.
    """
    n, m = num_stages, num_microbatches
    match schedule:
        case "1f1b":
            return Fraction(m, m + n - 1)
        case "interleaved":
            return Fraction(m * chunks, m * chunks + n - 1)
        case "paci":
            return Fraction(1)
    raise ValueError(f"{schedule!r} is none of {', '.join(SCHEDULES)}")
