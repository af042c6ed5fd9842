"""Numbers and tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real


def number(value: Real) -> str:
    """Return a number with up to six significant digits."""
    return f"{float(value):.6g}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines; the first column is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )
