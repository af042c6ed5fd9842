"""Asks, before anything is run, whether every run's flags can work; in a process of its own.

``problems`` starts ``python -m megatron_paci.compare.check``, which imports Megatron, parses the
flags of each run as the run will and judges them by the compatibility rules.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from argparse import Namespace
from typing import Any

from megatron_paci.children import python_path
from megatron_paci.compare.launch import failure
from megatron_paci.compare.plan import Plan
from megatron_paci.compare.short import TAKEN_OUT, iterations_done

SECONDS = 300


def problems(plan: Plan) -> dict[str, list[str]]:
    """Return by run what keeps it from working, as far as flags tell; empty lists if nothing.

    Flags of the script's own are not judged, and neither is what a script sets by itself: what
    they spoil shows in the run.

    Raises:
        RuntimeError: Megatron cannot be imported here, or its parser fails.
    """
    request = {
        "device": plan.device,
        "script": plan.script,
        "runs": {run.name: [*plan.arguments, *run.added] for run in plan.runs},
        "short": plan.short and {"done": plan.short.done, "last": plan.short.last},
    }
    environment = os.environ | {
        "WORLD_SIZE": str(plan.num_ranks), "RANK": "0", "PYTHONPATH": python_path(),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_paci.compare.check"], input=json.dumps(request),
            env=environment, capture_output=True, text=True, timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the flags were not checked within {SECONDS} s") from None
    if done.returncode:
        raise RuntimeError(f"the flags could not be checked:\n{failure(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])


def _judge(
    arguments: list[str], script: str, short: dict[str, int] | None = None
) -> list[str]:
    """Return the problems of one command line; the plugin is installed.

    Args:
        short: Iterations ``done`` before a short run, and the ``last`` one of it.
    """
    from megatron.training.arguments import parse_args

    from megatron_paci.compatibility import violations
    from megatron_paci.windows import microbatch_counts

    sys.argv = [script, *arguments]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            args = parse_args(ignore_unknown_args=True)
    except SystemExit:  # argparse has said why, behind all of its usage
        return [said.getvalue().rpartition("error: ")[2].strip() or "the flags cannot be parsed"]
    found = [line.removeprefix("- ") for line in violations(args)]
    stages, counts = args.pipeline_model_parallel_size, microbatch_counts(args).values()
    model = args.tensor_model_parallel_size * args.context_parallel_size * stages
    if args.world_size % model:
        found.append(
            f"{args.world_size} processes are no multiple of the {model} that one copy of the "
            f"model takes (tensor * pipeline * context parallel). Remedy: compare --nproc {model}, "
            "or a multiple."
        )
    if args.pipeline_schedule == "interleaved" and any(count % stages for count in counts):
        found.append(
            f"the interleaved schedule works in groups of {stages} microbatches (the number of "
            f"stages), and an iteration has {' or '.join(map(str, sorted(set(counts))))}. Remedy: "
            "change --global-batch-size, or drop interleaved from --schedules."
        )
    return found + (_short_problems(args, **short) if short else [])


def _short_problems(args: Namespace, *, done: int, last: int) -> list[str]:
    """Return why a run cannot be one from iteration ``done`` to ``last`` that saves nothing."""
    found = []
    total = args.train_iters
    if total is None and args.train_samples and args.global_batch_size:
        total = args.train_samples // args.global_batch_size
    if total is not None and last > total:
        after = f" after the checkpoint's {done}" if done else ""
        found.append(
            f"{last - done} iterations{after} go beyond the {total} of the training. Remedy: "
            "compare --iterations, or a longer training, to which the learning rate is fitted."
        )
    try:
        begins = iterations_done(
            load=args.load, step=args.ckpt_step, pretrained=args.pretrained_checkpoint,
            override=getattr(args, "override_ckpt_iteration", None), finetune=args.finetune,
        )
    except ValueError as error:
        return [*found, f"{error}."]
    if (begins, args.exit_interval, args.save) != (done, last, None):
        found.append(
            f"it would begin after iteration {begins} and not {done}, end after "
            f"{args.exit_interval} and not {last}, or save to {args.save}. Remedy: none of --load, "
            f"{', '.join(TAKEN_OUT)} in --only-for."
        )
    return found


def main() -> None:
    """Read a request from stdin and write the answer to the last line of stdout."""
    request: dict[str, Any] = json.load(sys.stdin)
    answer: dict[str, list[str]] = {}
    with contextlib.ExitStack() as stack:
        if request["device"] == "cpu":
            from megatron_paci.cpu import CpuDevice, cpu_environment, cpu_flags

            os.environ.update(cpu_environment(os.environ))
            stack.enter_context(CpuDevice())
        import megatron_paci

        megatron_paci.install()
        for name, arguments in request["runs"].items():
            own: list[str] = []
            if request["device"] == "cpu":
                try:
                    arguments = arguments + cpu_flags(arguments)
                except ValueError as error:
                    own = [str(error)]
            answer[name] = own + _judge(arguments, request["script"], request["short"])
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
