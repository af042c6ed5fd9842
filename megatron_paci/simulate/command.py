"""The command line: ``python -m megatron_paci simulate``."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from fractions import Fraction
from typing import Any

from megatron_paci.simulate.advice_command import ADVICE_FLAGS, add_advice_flags, run_advice
from megatron_paci.simulate.reading import Reader
from megatron_paci.simulate.times_command import FLAGS, add_times_flags, run_times
from megatron_paci.terminal import USAGE_ERROR, say_error
from megatron_paci.version import __version__


def add_simulate_command(commands: Any) -> None:
    """Add ``simulate`` to the subcommands of the package."""
    parser = commands.add_parser(
        "simulate",
        help="time pipeline schedules without running them",
        description="Time pipeline schedules from the orders that the engine runs: a pass begins "
        "as soon as its stage is free and its input is there. Times are in units of each other. "
        "Synchronous schedules step together after a flush, ZB-H2 and ZBV each stage after its own "
        "flush as their paper has it, PACI without one. --advise works the times out for a model.",
    )
    parser.set_defaults(run=run_simulate)
    parser.add_argument("--stages", metavar="N", help="pipeline stages (required)")
    parser.add_argument("--chunks", metavar="V",
                        help="interleaved: model chunks per stage (default: 2)")
    parser.add_argument("--latency", metavar="X",
                        help="time of a message between two stages (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="write the result to FILE")
    add_times_flags(parser)
    add_advice_flags(parser)


def run_simulate(options: argparse.Namespace, argv: list[str]) -> int:
    """Run the command line; return the exit status.

    Args:
        options: Parsed command line.
        argv: The command line as it was, for the record.
    """
    read = Reader()
    for flags, wanted in ((ADVICE_FLAGS, options.advise), (FLAGS, not options.advise)):
        for flag in flags:
            if getattr(options, flag.replace("-", "_")) and not wanted:
                remedy = "add --advise" if flags is ADVICE_FLAGS else "drop it, or drop --advise"
                read.problems.append(f"--{flag}: has no meaning here; {remedy}")
    json_path = read.file("json", options.json)
    if options.advise:
        report = run_advice(options, read)
    else:
        report = run_times(options, read)
    if report is None:
        for problem in read.problems:
            say_error(problem)
        return USAGE_ERROR
    text, result, draw = report
    sys.stdout.write(text)
    record = {
        "command": ["python", "-m", "megatron_paci", *argv],
        "versions": {"megatron_paci": __version__, "python": platform.python_version()},
        **result,
    }
    try:
        if json_path:
            json_path.write_text(json.dumps(record, indent=1, default=_plain) + "\n")
        draw()
    except OSError as error:
        say_error(f"cannot write: {error}; choose another place")
        return USAGE_ERROR
    return 0


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")
