"""What the commands of ``python -m megatron_paci`` say and return. Pure."""

from __future__ import annotations

import sys

FAILURE = 1
USAGE_ERROR = 2
INTERRUPTED = 130
"""Exit statuses: something failed, the command line is wrong, Ctrl-C."""


def say(text: str) -> None:
    """Write a line at once, in front of what child processes write later."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def say_error(text: str) -> None:
    """Write a line to stderr that names the program and says that it is an error."""
    sys.stderr.write(f"megatron_paci: error: {text}\n")
