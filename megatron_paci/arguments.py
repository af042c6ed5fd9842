"""The command-line flags: one dataclass, turned into flags by Megatron's own factory."""

# No "from __future__ import annotations" here: Megatron's factory reads the types of the fields.
import argparse
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

SCHEDULES = ("auto", "1f1b", "interleaved", "paci")


def _whole_number(text: str) -> int | str:
    """Return ``text`` as an int, or as it is.

    What is no number is reported together with every other fault of the command line
    (compatibility.py), not by argparse, which stops at the first one and prints all of Megatron's
    usage before it.
    """
    try:
        return int(text)
    except ValueError:
        return text


def is_whole(value: int | str, *, at_least: int) -> bool:
    """Whether the value of a flag is a whole number that is large enough."""
    return isinstance(value, int) and value >= at_least


@dataclass(kw_only=True)
class PaciArguments:
    """Choice of the pipeline schedule, and the asynchronous schedule PACI (arXiv 2606.07881)."""

    pipeline_schedule: str = field(
        default="auto", metadata={"argparse_meta": {"metavar": "{" + ",".join(SCHEDULES) + "}"}}
    )
    """Pipeline schedule of training: auto (what Megatron takes by itself), 1f1b, interleaved, or
    paci, which never flushes the pipeline between optimizer steps."""

    paci_accum: int | None = field(
        default=None, metadata={"argparse_meta": {"type": _whole_number, "metavar": "A"}}
    )
    """Backward passes that a stage accumulates before it takes an optimizer step of its own. Has to
    divide the number of microbatches per iteration, which is the default. Smaller values update
    more often, with gradients that are up to ceil((N-1)/A) updates old at pipeline size N."""

    paci_accum_schedule: str | None = field(
        default=None, metadata={"argparse_meta": {"metavar": "A:SAMPLE,..."}}
    )
    """Accumulations, each with the number of consumed samples from which on it holds, in the place
    of --paci-accum, e.g. sync:0,4:20000,8:100000. sync is 1F1B itself, flush included: a
    synchronous start for the time in which the loss falls fast. A change takes place at the first
    iteration that begins with so many samples or more; the pipeline is drained then."""

    paci_extra_in_flight: int = field(
        default=0, metadata={"argparse_meta": {"type": _whole_number, "metavar": "S"}}
    )
    """More microbatches in flight than 1F1B has: S for each link on the way from a stage to the
    last one, S*(N-1) on the first stage of N. They hide the time of messages between stages, S = 1
    up to half the time of a forward and a backward. They cost as many activations, and gradients
    are up to ceil((N-1)*(1+S)/A) updates old."""

    paci_defer_step: bool = False
    """Let the optimizer step of a window wait until one more forward pass has run, so that with
    --overlap-grad-reduce the reduction of its gradients over replicas runs during that pass.
    Gradients are up to ceil(N/A) updates old then, on the last stage up to 1."""

    paci_clip: Literal["pipelined", "local"] = "pipelined"
    """Norm that --clip-grad refers to: pipelined takes the gradients of all stages as far as they
    are known (own and later stages exactly, earlier ones from a few windows ago), local those of
    the stage alone."""

    paci_nonfinite: Literal["skip", "abort"] = "skip"
    """What to do with a window whose gradient is not finite: skip leaves its update out, on all
    stages that can know of it, and goes on; abort ends training."""

    paci_record: str | None = field(
        default=None, metadata={"argparse_meta": {"metavar": "DIR"}}
    )
    """Folder that receives one JSON file per rank at the end of training: loss, samples and seconds
    of every iteration, peak bytes of parameters and activations and of the GPU, and under paci
    drift and queue depth. Works under every schedule; python -m megatron_paci compare makes its
    report of such files."""

    paci_telemetry: Literal["auto", "on", "off"] = "auto"
    """Figures of every stage (drift, queue depth, idle time, clipping, skipped updates) in
    Megatron's log, TensorBoard and Weights & Biases: auto where --tensorboard-dir or
    --wandb-project is given."""

    paci_trace: str | None = field(default=None, metadata={"argparse_meta": {"metavar": "DIR"}})
    """Folder that receives one file of JSON lines per rank: when every pass, update, wait and
    message was. python -m megatron_paci trace DIR makes a time line, a summary and a file for
    Perfetto of them. Works under every schedule."""

    paci_stall_seconds: int = field(
        default=0, metadata={"argparse_meta": {"type": _whole_number, "metavar": "S"}}
    )
    """Let every rank print what it is doing (action, queue, last actions, stack) when nothing has
    been done for S seconds, in an action, an evaluation or a checkpoint; training goes on. With 0
    it does so only shortly before --distributed-timeout-minutes is over."""

    paci_accept_unknown_flags: bool = False
    """Let arguments through that this version of megatron_paci does not know, those of a newer
    Megatron; they may not work together with paci."""


def add_paci_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group of flags to Megatron's parser and return it."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    ArgumentGroupFactory(PaciArguments).build_group(parser, title="paci")
    _escape_percent_signs(parser)
    return parser


def _escape_percent_signs(parser: argparse.ArgumentParser) -> None:
    """Let ``--help`` work: a lone percent sign in one of Megatron 0.19's texts makes it raise."""
    for action in parser._actions:
        try:
            (action.help or "") % vars(action)
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")


def selected_schedule(args: argparse.Namespace | None) -> str:
    """Return the chosen schedule; ``auto`` where the flags were never parsed."""
    return getattr(args, "pipeline_schedule", "auto")


class Argument(NamedTuple):
    """One argument of a parser."""

    flag: str
    default: Any


@functools.cache
def megatron_arguments() -> dict[str, Argument]:
    """Return the arguments of the installed Megatron by name, without those of the plugin and of a
    launch script."""
    from megatron.training.arguments import add_megatron_arguments

    return _arguments_of(inspect.unwrap(add_megatron_arguments))


@functools.cache
def paci_arguments() -> dict[str, Argument]:
    """Return the plugin's own arguments by name."""
    return _arguments_of(add_paci_arguments)


def _arguments_of(add_arguments: Callable[[argparse.ArgumentParser], Any]) -> dict[str, Argument]:
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    flags = {action.dest: action.option_strings[0] for action in reversed(parser._actions)}
    return {name: Argument(flags[name], default) for name, default in defaults.items()}
