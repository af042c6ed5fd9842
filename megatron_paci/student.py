"""Intervals around means of few values, by Student's t. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev

STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
"""97.5th percentile for 1, 2, ... degrees of freedom."""


def percentile(degrees: int) -> float:
    """Return the 97.5th percentile for so many degrees of freedom, for more than 30 that of 30."""
    return STUDENT[min(degrees, len(STUDENT)) - 1]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95% interval; that is NaN for one value."""
    if len(values) < 2:
        return mean(values), math.nan
    return mean(values), percentile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
