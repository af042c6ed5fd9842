"""The command-line flags: one dataclass, turned into flags by Megatron's own factory."""

# No "from __future__ import annotations" here: Megatron's factory reads the types of the fields.
import argparse
from dataclasses import dataclass, field
from typing import Literal

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
    """Folder that receives one JSON file per rank at the end of training: loss and seconds of every
    iteration, peak bytes of parameters and activations, and under paci drift and queue depth. Works
    under every schedule, to compare them."""


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
