"""Command line: ``python -m megatron_paci run [--device cpu] SCRIPT ARGS...`` and others.

``run`` hooks the schedule into Megatron and then runs a launch script as if it had been started by
itself. It goes where the script would go behind torchrun::

    torchrun --nproc-per-node 8 -m megatron_paci run pretrain_gpt.py <the usual flags> \\
        --pipeline-schedule paci --paci-accum 4

``bench`` measures schedules on this machine's CPUs (megatron_paci/bench)::

    python -m megatron_paci bench virtual --stages 4 --microbatches 8 --schedule paci --json FILE

``simulate`` times schedules without running anything (megatron_paci/simulate)::

    python -m megatron_paci simulate --stages 4 --microbatches 8 --picture FILE.png

``trace`` shows when every rank of a run did what (``--paci-trace DIR``)::

    python -m megatron_paci trace DIR

``compare`` trains the same model under several schedules and writes one report
(megatron_paci/compare)::

    python -m megatron_paci compare --nproc 8 --accum 4,8 --output DIR pretrain_gpt.py <flags>

and with ``--short`` tells in one line whether the loss curves of 1F1B and PACI part.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from megatron_paci.bench.command import add_bench_command
from megatron_paci.compare.command import add_compare_command
from megatron_paci.simulate.command import add_simulate_command
from megatron_paci.terminal import USAGE_ERROR, say_error
from megatron_paci.trace_command import add_trace_command
from megatron_paci.version import __version__


def main(argv: list[str] | None = None) -> int:
    """Run the command line ``argv`` (without the program name); return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_paci", description="PACI pipeline schedule for Megatron."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a Megatron launch script with the plugin installed",
        description="Hook the PACI schedule into Megatron, then run SCRIPT as __main__. Everything "
        "after SCRIPT goes to it; there --pipeline-schedule paci turns the schedule on.",
    )
    run.add_argument(
        "--device",
        choices=("gpu", "cpu"),
        default="gpu",
        help="cpu runs unmodified Megatron without a GPU, over gloo (default: gpu)",
    )
    run.add_argument("script", metavar="SCRIPT", help="launch script, e.g. pretrain_gpt.py")
    run.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    add_bench_command(commands)
    add_compare_command(commands)
    add_simulate_command(commands)
    add_trace_command(commands)
    argv = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(argv)
    if options.command != "run":
        return options.run(options, argv)
    return run_script(options.script, options.arguments, device=options.device)


def run_script(script: str, arguments: list[str], *, device: str = "gpu") -> int:
    """Run ``script`` with the hooks in place; return the exit status.

    A command line that cannot run ends with one message, printed by rank 0 alone, and status 2.
    """
    path = Path(script)
    if not path.is_file():
        reason = "is a folder" if path.is_dir() else "does not exist"
        return _refuse(f"the launch script {script} {reason}; give the path of e.g. "
                       "Megatron-LM's pretrain_gpt.py, or examples/pretrain_gpt.py of this project")
    if device == "cpu":
        from megatron_paci.cpu import CpuDevice, cpu_environment, cpu_flags

        try:
            arguments = arguments + cpu_flags(arguments)
        except ValueError as error:
            return _refuse(str(error))
        os.environ.update(cpu_environment(os.environ))
        with CpuDevice():
            return _run_hooked(path, arguments)
    return _run_hooked(path, arguments)


def _run_hooked(path: Path, arguments: list[str]) -> int:
    # The script's own folder comes first, as if it had been started directly, so that its
    # neighbours (and a Megatron-LM checkout around it) are what it imports.
    sys.path.insert(0, str(path.resolve().parent))
    sys.argv = [str(path), *arguments]

    import megatron_paci
    from megatron_paci.compatibility import ConfigurationError
    from megatron_paci.patching import PatchError

    try:
        megatron_paci.install()
        runpy.run_path(str(path), run_name="__main__")
    except (ConfigurationError, PatchError) as error:
        return _refuse(str(error))
    return 0


def _refuse(message: str) -> int:
    if int(os.environ.get("RANK", "0")) == 0:
        say_error(message)
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
