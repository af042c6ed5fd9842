"""The command line: ``python -m megatron_paci compare ... SCRIPT FLAGS``."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_paci.compare.check import problems
from megatron_paci.compare.gap import LEAST_ITERATIONS
from megatron_paci.compare.plan import SCHEDULES, Plan, PlanError, make_plan
from megatron_paci.compare.report import collect, write_report
from megatron_paci.compare.runs import do_runs
from megatron_paci.compare.short import ITERATIONS, PAIR, make_short
from megatron_paci.simulate.reading import Reader
from megatron_paci.terminal import FAILURE, INTERRUPTED, USAGE_ERROR, say, say_error

PLAN = "plan.json"


def add_compare_command(commands: Any) -> None:
    """Add ``compare`` to the subcommands of the package."""
    parser = commands.add_parser(
        "compare",
        help="train the same model under several schedules and write one report",
        description="Run a Megatron launch script with the same flags under several schedules, one "
        "after another, and write DIR/report.html, report.md, report.json and pictures. What has "
        "been run before with the very same command is not run again. Everything after SCRIPT "
        "goes to it; flags of the schedule, of records and of traces are added.",
    )
    parser.set_defaults(run=run_compare)
    parser.add_argument("--output", metavar="DIR", required=True, help="folder of the comparison")
    parser.add_argument("--nproc", metavar="N", help="processes, in all (default: 1)")
    parser.add_argument(
        "--short", action="store_true",
        help="tell in one line whether the loss curves of 1F1B and PACI part: a few hundred "
        "iterations of each, from the checkpoint of the script's --load if it has one, without "
        "traces or saving, and a paired test",
    )
    parser.add_argument("--iterations", metavar="N", help="with --short: iterations of each run "
                        f"(default: {ITERATIONS})")
    parser.add_argument("--seeds", metavar="K", help="with --short: repeat it with K seeds, and "
                        "test over these (default: 1)")
    parser.add_argument(
        "--schedules", metavar="NAME[,NAME...]",
        help=f"schedules to compare (default: {','.join(SCHEDULES)})",
    )
    parser.add_argument(
        "--accum", metavar="A[,A...]",
        help="PACI's backward passes per optimizer step, a run for each (default: the microbatches "
        "of an iteration)",
    )
    parser.add_argument(
        "--chunks", metavar="V", help="model chunks per stage of the interleaved schedule "
        "(default: 2)",
    )
    parser.add_argument(
        "--only-for", metavar='"SCHEDULE: FLAGS"', action="append", default=[],
        help="flags of the script for one schedule alone, e.g. another layout of layers; may be "
        "repeated for other schedules",
    )
    parser.add_argument(
        "--device", choices=("gpu", "cpu"), default="gpu",
        help="cpu runs unmodified Megatron without a GPU, and measures in virtual time as well "
        "(default: gpu)",
    )
    parser.add_argument(
        "--launcher", metavar='"WORDS"',
        help="what starts N processes of what follows it, e.g. 'srun torchrun --nnodes 2 ...' "
        "(default: torchrun on this machine)",
    )
    parser.add_argument("--no-trace", action="store_true",
                        help="leave out traces: no idle time by cause, no time line, no simulation")
    parser.add_argument("--no-virtual", action="store_true",
                        help="with --device cpu: do not measure in virtual time")
    parser.add_argument("--again", action="store_true", help="run all anew")
    parser.add_argument(
        "--print-commands", action="store_true",
        help="print the commands and run nothing; start them yourself, then --report-only",
    )
    parser.add_argument("--report-only", action="store_true",
                        help="make the report of what there is in DIR, and run nothing")
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="launch script")
    parser.add_argument("arguments", metavar="FLAGS", nargs=argparse.REMAINDER)


def run_compare(options: argparse.Namespace, argv: list[str]) -> int:
    """Run the command line; return the exit status."""
    output = Path(options.output)
    try:
        plan = Plan.read(output / PLAN) if options.report_only else _plan(options, output)
        make_folder(output)
        if options.print_commands:
            plan.write(output / PLAN)
            for run in plan.runs:
                sys.stdout.write(f"# {run.label}\n{shlex.join(run.command)}\n")
            return 0
        if not options.report_only:
            _check(plan)
            plan.write(output / PLAN)
    except (PlanError, RuntimeError, OSError) as error:
        for line in str(error).splitlines():
            say_error(line)
        return USAGE_ERROR
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: take the ranks along
    what = "Pipeline schedules" if plan.short is None else "Loss curves"
    return compare(
        plan, output, title=f"{what} compared: {Path(plan.script).name}",
        run=not options.report_only, again=options.again,
        virtual=plan.device == "cpu" and plan.short is None
        and not (options.no_virtual or options.report_only),
        notes={"compared by": shlex.join(["python", "-m", "megatron_paci", *argv])},
    )


def compare(
    plan: Plan,
    output: Path,
    *,
    title: str,
    run: bool = True,
    again: bool = False,
    virtual: bool = False,
    notes: Mapping[str, Any] | None = None,
    stall_seconds: float | None = None,
    show: Any = None,
) -> int:
    """Do a plan's runs and write the report of all that ended well; return the exit status.

    Args:
        output: Folder for the report.
        title: Of the report.
        run: Whether to run anything; else the report is of what there is.
        again: Whether to run also what has been run before.
        virtual: Whether to measure in virtual time as well.
        notes: More for the report.
        stall_seconds: See ``launch.train``.
        show: Called with the report in place of printing its verdict.
    """
    status = 0
    try:
        if run:
            do_runs(plan, again=again, stall_seconds=stall_seconds)
        if virtual:
            say("virtual time: a few iterations of each run")
        report = collect(plan, virtual=virtual, notes=notes)
    except KeyboardInterrupt:
        sys.stderr.write("megatron_paci: stopped; the same command goes on with what is missing\n")
        status = INTERRUPTED
        report = collect(plan, notes=notes)
    except OSError as error:
        say_error(f"cannot write: {error}")
        return FAILURE
    good = [entry for entry in report["runs"].values() if entry["state"] == "done"]
    try:
        written = write_report(report, plan, output, title=title)
    except OSError as error:
        say_error(f"cannot write the report: {error}")
        return FAILURE
    if good:
        (show or _show)(report, written)
    failed = [entry["label"] for entry in report["runs"].values() if entry["state"] != "done"]
    if failed and not status:
        sys.stderr.write(f"megatron_paci: failed: {', '.join(failed)}; the reason is in the "
                         "report, and the same command tries again\n")
    return status or (FAILURE if failed else 0)


def _show(report: Mapping[str, Any], written: list[Path]) -> None:
    found = report["verdict"]
    lines = ["", found["headline"], *(f"- {text}" for text in found["facts"]), "", *written]
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _plan(options: argparse.Namespace, output: Path) -> Plan:
    """Return the plan that the command line asks for.

    Raises:
        PlanError: With every reason why it makes no sense.
    """
    read = Reader()
    if options.script is None:
        read.problems.append("SCRIPT is missing; give the launch script and its flags at the end")
    num_ranks = read.whole("nproc", options.nproc, 1)
    accum = read.wholes("accum", options.accum, [])
    chunks = read.whole("chunks", options.chunks, 2, least=2)
    if options.schedules is None:
        schedules = list(PAIR if options.short else SCHEDULES)
    else:
        schedules = [name.strip() for name in options.schedules.split(",")]
    iterations = read.whole("iterations", options.iterations, ITERATIONS,
                            least=LEAST_ITERATIONS)
    num_seeds = read.whole("seeds", options.seeds, 1)
    if options.short and sorted(schedules) != sorted(PAIR):
        read.refuse("schedules", options.schedules, "--short compares PACI with 1F1B, of which "
                    "other schedules with synchronous updates differ by rounding alone; drop it")
    for flag in ("iterations", "seeds"):
        if (text := getattr(options, flag)) is not None and not options.short:
            read.refuse(flag, text, "goes with --short alone")
    if options.accum is not None and "paci" not in schedules:
        read.refuse("accum", options.accum, "paci is not among --schedules; drop it")
    only_for: dict[str, list[str]] = {}
    try:
        for text in options.only_for:
            name, _, flags = text.partition(":")
            only_for[name.strip()] = shlex.split(flags)
        launcher = shlex.split(options.launcher or "")
    except ValueError as error:
        read.problems.append(f"--only-for, --launcher: {str(error).lower()}; check the quotes")
    short, arguments = None, options.arguments
    if options.short:
        try:
            short, arguments = make_short(
                arguments, iterations=iterations, num_seeds=num_seeds)
        except (ValueError, OSError) as error:
            read.problems.append(str(error))
    if read.problems:
        raise PlanError("\n".join(read.problems))
    return make_plan(
        options.script, arguments, output=output, num_ranks=num_ranks,
        device=options.device, schedules=schedules, accum=accum, chunks=chunks, only_for=only_for,
        launcher=launcher, trace=not (options.no_trace or options.short), short=short,
    )


def _check(plan: Plan) -> None:
    """Refuse a plan of which a run cannot work, before anything is run.

    Raises:
        PlanError: With every reason, by run.
    """
    say("checking the flags of every run")
    found = problems(plan)
    labels = {run.name: run.label for run in plan.runs}
    lines = [f"{labels[name]}: {text}" for name, texts in found.items() for text in texts]
    if lines:
        raise PlanError("\n".join(["these runs cannot work, so nothing is run:", *lines]))


def make_folder(output: Path) -> None:
    """Make the folder of a comparison.

    Raises:
        PlanError: It cannot be written to.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / ".writable").touch()
        (output / ".writable").unlink()
    except OSError as error:
        raise PlanError(f"--output {output}: cannot write there ({error.strerror}); choose "
                        "another folder") from None
