"""Checks a command line against the table of rules; one error lists every rule it breaks."""

from __future__ import annotations

import argparse
import logging
import os

from megatron_paci.arguments import selected_schedule
from megatron_paci.rules import PACI_RULES, SELECTION_RULES, divisors, microbatch_counts

logger = logging.getLogger(__name__)

TRIED_MEGATRON_VERSIONS = ("0.18.2", "0.19.2")


class ConfigurationError(ValueError):
    """A command line that cannot run; the message lists every reason with its remedy."""


def violations(args: argparse.Namespace) -> list[str]:
    """Return one line per broken rule: the reason and the remedy."""
    rules = SELECTION_RULES + (PACI_RULES if selected_schedule(args) == "paci" else ())
    facts = {"args": args, "counts": "", "divisors": ""}
    if selected_schedule(args) == "paci":
        if counts := microbatch_counts(args):
            facts["counts"] = " or ".join(map(str, sorted(set(counts))))
            facts["divisors"] = divisors(args)
    return [
        f"- {rule.reason.format(**facts)}. Remedy: {rule.remedy.format(**facts)}."
        for rule in rules
        if rule.violated(args)
    ]


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot run.

    Raises:
        ConfigurationError: With every broken rule, its reason and its remedy.
    """
    if broken := violations(args):
        raise ConfigurationError("megatron_paci cannot run with these flags:\n" + "\n".join(broken))


def take_over(args: argparse.Namespace) -> None:
    """Turn off what Megatron has on by default and PACI replaces; one warning names it all."""
    changed = []
    if args.rerun_mode != "disabled":
        changed.append(
            f"--rerun-mode {args.rerun_mode} -> disabled (a step cannot be repeated in place while "
            "later microbatches are in flight)"
        )
        args.rerun_mode = "disabled"
    if args.check_for_nan_in_loss_and_grad:
        changed.append(
            "--no-check-for-nan-in-loss-and-grad added (that check ends training; "
            f"--paci-nonfinite {args.paci_nonfinite} decides now)"
        )
        args.check_for_nan_in_loss_and_grad = False
    if args.timing_log_level > 0 and args.barrier_with_L1_time:
        changed.append("--no-barrier-with-level-1-timing added (barriers would stop the stream)")
        args.barrier_with_L1_time = False
    if changed and int(os.environ.get("RANK", "0")) == 0:
        logger.warning("--pipeline-schedule paci changes: %s", "; ".join(changed))


def warn_untried_version(version: str) -> None:
    """Say once that this Megatron-Core version is not one the hooks were tried on."""
    if version not in TRIED_MEGATRON_VERSIONS and int(os.environ.get("RANK", "0")) == 0:
        logger.warning(
            "megatron_paci was tried with Megatron-Core %s, this is %s; the hooked functions have "
            "the expected signatures, but check the results against --pipeline-schedule 1f1b",
            ", ".join(TRIED_MEGATRON_VERSIONS), version,
        )
