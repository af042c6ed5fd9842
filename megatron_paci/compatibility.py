"""Checks a command line against the table of what works; one error lists all that does not."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_paci.arguments import megatron_arguments, paci_arguments, selected_schedule
from megatron_paci.delay import COMPARE, SAFE_DRIFT
from megatron_paci.features import WORKS
from megatron_paci.known_arguments import INDIFFERENT
from megatron_paci.refused import PACI_RULES
from megatron_paci.rules import SELECTION_RULES, Rule
from megatron_paci.schedule import StageSchedule
from megatron_paci.unproved import UNPROVED
from megatron_paci.windows import (
    divisors,
    indivisible,
    microbatch_counts,
    phases_fault,
    shortest_window,
)

logger = logging.getLogger(__name__)

TRIED_MEGATRON_VERSIONS = ("0.18.2", "0.19.1", "0.19.2")


class ConfigurationError(ValueError):
    """A command line that cannot run; the message lists every reason with its remedy."""


def known_arguments() -> set[str]:
    """Return the names of all arguments that the table knows."""
    relevant = {name for entry in (*WORKS, *UNPROVED, *PACI_RULES) for name in entry.arguments}
    return relevant.union(*(names.split() for names in INDIFFERENT.values()))


def violations(args: argparse.Namespace) -> list[str]:
    """Return one line per reason why the arguments cannot run: flags in use, reason, remedy."""
    lines = [_line(rule, args) for rule in SELECTION_RULES if rule.violated(args)]
    if selected_schedule(args) == "paci":
        lines += [_line(rule, args) for rule in PACI_RULES if rule.violated(args)]
        if not args.paci_accept_unknown_flags:
            lines += [
                f"- {flag}: megatron_paci does not know what it does to the schedule. Remedy: drop "
                "it, or add --paci-accept-unknown-flags and compare the results with "
                "--pipeline-schedule 1f1b."
                for flag in unknown_flags(args)
            ]
    return lines


def _line(rule: Rule, args: argparse.Namespace) -> str:
    facts = {"args": args, "counts": "", "divisors": ""}
    if "paci_accum" in rule.arguments and (counts := microbatch_counts(args)):
        facts["counts"] = " or ".join(map(str, sorted(set(counts.values()))))
        facts["divisors"] = divisors(args)
    if "paci_accum_schedule" in rule.arguments:
        facts |= {"phases_fault": phases_fault(args), "indivisible": indivisible(args)}
    in_use = _in_use(rule.arguments, args)
    facts["flags"] = ", ".join(flag for flag, _ in in_use)
    typed = ", ".join(f"{flag} {value}".rstrip() for flag, value in in_use)
    reason, remedy = rule.reason.format(**facts), rule.remedy.format(**facts)
    return f"- {typed or rule.feature}: {reason}. Remedy: {remedy}."


def _in_use(names: Sequence[str], args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return those of the arguments that differ from their default: (flag, value as typed)."""
    known = {**megatron_arguments(), **paci_arguments()}
    found = []
    for name in names:
        flag, default = known.get(name, (f"--{name.replace('_', '-')}", None))
        value = getattr(args, name, default)
        if value != default:
            values = value if isinstance(value, list) else [value]
            text = " ".join(str(each) for each in values if not isinstance(each, bool))
            found.append((flag, text))
    return found


def unknown_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags in use that this Megatron has and the table does not know.

    Flags that a launch script adds to Megatron's are its own affair.
    """
    known = known_arguments()
    names = [name for name in megatron_arguments() if name not in known]
    return [flag for flag, _ in _in_use(names, args)]


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot run.

    Raises:
        ConfigurationError: With every broken rule, its reason and its remedy.
    """
    if broken := violations(args):
        raise ConfigurationError("megatron_paci cannot run with these flags:\n" + "\n".join(broken))


def check_parsed(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Refuse a choice of schedule that has not reached the parsed arguments.

    Raises:
        ConfigurationError: A YAML file has replaced the whole command line.
    """
    selects = any(word.split("=")[0] == "--pipeline-schedule" for word in command)
    if selects and not hasattr(args, "pipeline_schedule"):
        rule = next(rule for rule in PACI_RULES if "yaml_cfg" in rule.arguments)
        raise ConfigurationError(f"--yaml-cfg: {rule.reason}. Remedy: {rule.remedy}.")


def check_call(call: Mapping[str, Any]) -> None:
    """Refuse a call of Megatron's ``train`` that asks for more than one model's pipeline.

    Raises:
        ConfigurationError: It brings a communicator or process groups of a multi-module pipeline.
    """
    for name in ("p2p_communicator", "pg_collection"):
        if call.get(name) is not None:
            raise ConfigurationError(
                f"train({name}=...): PACI makes its own links between the stages of one model, "
                "multi-module pipelines are not supported. Remedy: take --pipeline-schedule auto."
            )


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


def warn_of_delay(args: argparse.Namespace) -> None:
    """Say once if gradients can be older than is known to be safe, which may cost quality."""
    if not (accumulation := shortest_window(args)):
        return  # 1F1B all the time
    schedule = StageSchedule(
        0, args.pipeline_model_parallel_size, accumulation, args.paci_extra_in_flight,
        args.paci_defer_step,
    )
    if schedule.drift_bound > SAFE_DRIFT and int(os.environ.get("RANK", "0")) == 0:
        logger.warning(
            "stage 0 accumulates gradients that are up to %d optimizer steps old (%d stages, %d "
            "microbatches in flight, accumulation %d); what that costs depends on the optimizer: "
            "compare with 1F1B (%s), or accumulate %d backwards or more, with more microbatches "
            "per iteration if need be",
            schedule.drift_bound, schedule.num_stages, schedule.depth, accumulation, COMPARE,
            -(-(schedule.depth - 1 + schedule.defer_step) // SAFE_DRIFT),
        )


def warn_unproved(args: argparse.Namespace) -> None:
    """Name once what is let through although no test has proved it."""
    names = [feature.name for feature in UNPROVED if feature.in_use(args)]
    names += unknown_flags(args)
    if names and int(os.environ.get("RANK", "0")) == 0:
        logger.warning(
            "--pipeline-schedule paci has not been proved together with: %s; compare the results "
            "with --pipeline-schedule 1f1b", ", ".join(names)
        )


def warn_untried_version(version: str) -> None:
    """Say once that this Megatron-Core version is not one the hooks were tried on."""
    if version not in TRIED_MEGATRON_VERSIONS and int(os.environ.get("RANK", "0")) == 0:
        logger.warning(
            "megatron_paci was tried with Megatron-Core %s, this is %s; the hooked functions have "
            "the expected signatures, but check the results against --pipeline-schedule 1f1b",
            ", ".join(TRIED_MEGATRON_VERSIONS), version,
        )
