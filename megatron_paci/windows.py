"""Which windows a command line leads to, before Megatron has validated it."""

from __future__ import annotations

import argparse

from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from megatron_paci.accumulation import SYNC, parse_phases, value_at
from megatron_paci.arguments import is_whole


def data_parallel_size(args: argparse.Namespace) -> int:
    """Return the number of data-parallel replicas that the flags imply."""
    model = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    return max(1, args.world_size // model)


def microbatch_counts(args: argparse.Namespace) -> dict[int, int]:
    """Return every number of microbatches per iteration that the flags lead to.

    By the sample from which on it holds: more than one only with ``--step-batch-size-schedule``.
    Empty if the flags are incomplete or faulty, which Megatron itself reports.
    """
    samples = (args.micro_batch_size or 0) * data_parallel_size(args)
    schedule = getattr(args, "step_batch_size_schedule", None)
    if not samples:
        return {}
    if schedule is None:
        return {0: (args.global_batch_size or samples) // samples}
    try:
        calculator = StepBatchsizeNumMicroBatchesCalculator(
            args.micro_batch_size, data_parallel_size(args), False, rank=-1, schedule=schedule,
            seq_length=args.seq_length,
        )
    except (AssertionError, ValueError):
        return {}
    return {first: size // samples for first, size in calculator.schedule}


def accumulations(args: argparse.Namespace) -> dict[int, int | None]:
    """Return every accumulation that the flags lead to, by the sample from which on it holds.

    ``SYNC`` in a synchronous phase, None where a window is an iteration. Empty if the flags are
    faulty.
    """
    if phases_fault(args):
        return {}
    if args.paci_accum_schedule is not None:
        return dict(parse_phases(args.paci_accum_schedule))
    faulty = args.paci_accum is not None and not is_whole(args.paci_accum, at_least=1)
    return {} if faulty else {0: args.paci_accum}


def windows(args: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Return (first sample, accumulation, number of microbatches) of every range of samples.

    Synchronous phases are left out; empty if the flags are incomplete or faulty.
    """
    counts, sizes = microbatch_counts(args), accumulations(args)
    found = []
    for first in sorted(counts | sizes) if counts and sizes else ():
        count, size = value_at(counts, first), value_at(sizes, first)
        if size != SYNC:
            found.append((first, count if size is None else size, count))
    return found


def shortest_window(args: argparse.Namespace) -> int:
    """Return the smallest accumulation that the flags lead to, 0 if there is none."""
    return min((size for _, size, _ in windows(args)), default=0)


def indivisible(args: argparse.Namespace) -> str:
    """Return which windows do not divide their iteration, as text."""
    return " and ".join(
        f"{size} not the {count} microbatches of an iteration from sample {first} on"
        for first, size, count in windows(args) if count % size
    )


def phases_fault(args: argparse.Namespace) -> str:
    """Return what is wrong with ``--paci-accum-schedule``, empty if nothing is."""
    if args.paci_accum_schedule is not None:
        try:
            parse_phases(args.paci_accum_schedule)
        except ValueError as error:
            return str(error)
    return ""


def divisors(args: argparse.Namespace) -> str:
    """Return the accumulations that fit every number of microbatches, as text."""
    counts = microbatch_counts(args).values()
    fitting = [a for a in range(1, min(counts) + 1) if not any(count % a for count in counts)]
    return " or ".join(map(str, fitting[-4:]))
