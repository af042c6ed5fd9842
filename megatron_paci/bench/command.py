"""The command line: ``python -m megatron_paci bench virtual ...``, and what all benchmarks share.

A benchmark is a module with

- ``HELP`` and ``DESCRIPTION``: what it measures, in half a line and in a paragraph;
- ``SECONDS``: its time limit unless ``--timeout`` says otherwise;
- ``add_arguments(parser)``: adds its flags, as text or with a type;
- ``read(options, reader)``: returns its parameters, of whatever type it likes; every mistake goes
  to ``reader`` (``reader.refuse(flag, value, reason and remedy)``), and nothing is started;
- ``measure(parameters, seconds)``: measures and returns the result as plain values, the keys of the
  JSON file;
- ``table(result)``: returns the result as text for the terminal.

Importing it loads neither PyTorch nor Megatron. An entry in ``BENCHMARKS`` makes it a subcommand.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from datetime import datetime, timezone
from typing import Any

from megatron_paci.bench import (
    emulated_command,
    host_command,
    memory_command,
    real_command,
    scale_command,
    virtual_command,
)
from megatron_paci.bench.ranks import RankError
from megatron_paci.simulate.reading import Reader
from megatron_paci.terminal import FAILURE, INTERRUPTED, USAGE_ERROR, say_error
from megatron_paci.version import versions

BENCHMARKS = {
    "real": real_command,
    "emulated": emulated_command,
    "virtual": virtual_command,
    "memory": memory_command,
    "host": host_command,
    "scale": scale_command,
}


def add_bench_command(commands: Any) -> None:
    """Add ``bench`` to the subcommands of the package."""
    bench = commands.add_parser("bench", help="measure pipeline schedules on this machine's CPUs")
    benchmarks = bench.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in BENCHMARKS.items():
        parser = benchmarks.add_parser(
            name, help=benchmark.HELP, description=benchmark.DESCRIPTION
        )
        parser.set_defaults(run=run_benchmark)
        benchmark.add_arguments(parser)
        parser.add_argument(
            "--timeout", metavar="SECONDS", type=float, default=benchmark.SECONDS,
            help="end all processes after so long (default: %(default)s)",
        )
        parser.add_argument("--json", metavar="FILE", help="write the result to FILE")


def run_benchmark(options: argparse.Namespace, argv: list[str]) -> int:
    """Measure, write the JSON file and print a table; return the exit status.

    Args:
        options: Parsed command line.
        argv: The command line as it was, for the record.
    """
    benchmark = BENCHMARKS[options.benchmark]
    reader = Reader()
    path = reader.file("json", options.json)
    if not 0 < options.timeout < math.inf:
        reader.refuse("timeout", f"{options.timeout:g}", "give seconds, more than 0")
    parameters = benchmark.read(options, reader)
    if reader.problems:
        for problem in reader.problems:
            say_error(problem)
        return USAGE_ERROR
    began = datetime.now(timezone.utc)
    try:
        result = benchmark.measure(parameters, options.timeout)
    except RankError as error:
        say_error(str(error))
        return FAILURE
    except KeyboardInterrupt:
        sys.stderr.write("megatron_paci: interrupted; all ranks are stopped\n")
        return INTERRUPTED
    sys.stdout.write(benchmark.table(result))
    if path is not None:
        record = {
            "benchmark": options.benchmark,
            "command": ["python", "-m", "megatron_paci", *argv],
            "date": began.isoformat(timespec="seconds"),
            "versions": versions(),
            **result,
        }
        try:
            path.write_text(json.dumps(record, indent=1) + "\n")
        except OSError as error:
            say_error(f"cannot write: {error}; choose another place")
            return FAILURE
    return 0
