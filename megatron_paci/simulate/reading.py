"""Reading the numbers of a command line: each mistake becomes one line with its remedy."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

from megatron_paci.bench.costs import per_stage, time


class Reader:
    """Reads values and collects what is wrong with them in ``problems``."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def refuse(self, flag: str, value: object, reason: str) -> None:
        """Note what is wrong with the value of a flag, and what to give instead."""
        self.problems.append(f"--{flag} {value}: {reason}")

    def whole(self, flag: str, text: str | None, default: int, *, least: int = 1) -> int:
        """Read a whole number; in place of a wrong one return ``default``."""
        if text is None:
            return default
        try:
            value = int(text)
        except ValueError:
            self.refuse(flag, text, f"not a whole number; give {least} or more")
            return default
        if value < least:
            self.refuse(flag, text, f"too small; give {least} or more")
            return default
        return value

    def wholes(self, flag: str, text: str | None, default: list[int]) -> list[int]:
        """Read whole numbers from 1 on, separated by commas."""
        if text is None:
            return default
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError:
            values = [0]
        if min(values) < 1:
            self.refuse(flag, text, "give whole numbers of 1 or more, separated by commas")
            return default
        return values

    def number(self, flag: str, text: str | None, default: Fraction) -> Fraction:
        """Read a number of at least 0, such as 0.5 or 1/3."""
        if text is None:
            return default
        try:
            return time(text)
        except ValueError as error:
            self.refuse(flag, text, str(error))
            return default

    def stages(
        self, flag: str, text: str | None, num_stages: int, default: Fraction
    ) -> tuple[Fraction, ...]:
        """Read one number for all stages, or one for each, separated by commas."""
        if text is None:
            return (default,) * num_stages
        try:
            return per_stage(text, num_stages)
        except ValueError as error:
            self.refuse(flag, text, str(error))
            return (default,) * num_stages

    def file(self, flag: str, text: str | None, *, suffixes: tuple[str, ...] = ()) -> Path | None:
        """Return the path of a file that can be written."""
        if text is None:
            return None
        path = Path(text)
        folder = path.parent
        if suffixes and path.suffix.lower() not in suffixes:
            self.refuse(flag, text, f"the name has to end in {' or '.join(suffixes)}")
        elif path.is_dir():
            self.refuse(flag, text, "is a folder; give the name of a file")
        elif not folder.is_dir():
            self.refuse(flag, text, f"there is no folder {folder}; create it, or choose another")
        elif not os.access(path if path.exists() else folder, os.W_OK):
            self.refuse(flag, text, "cannot be written; choose another place")
        return path
