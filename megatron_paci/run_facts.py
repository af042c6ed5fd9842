"""What a rank knows of its run: its place in it, the schedule, sizes, versions."""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_paci.accumulation import accumulation_at
from megatron_paci.arguments import selected_schedule
from megatron_paci.version import versions


def place(args: Any) -> dict[str, Any]:
    """Return where this rank stands in the job, and under which schedule.

    ``replica`` tells the pipelines of a job apart: it is the first rank of this one.
    ``accumulation`` is the window of PACI, None under other schedules; of several the last one.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    schedule = selected_schedule(args)
    window = None
    if schedule == "paci":
        count = get_num_microbatches()
        window = accumulation_at(args, sys.maxsize, count) or count
    return {
        "rank": torch.distributed.get_rank(),
        "stage": pipeline.rank(),
        "num_stages": pipeline.size(),
        "replica": torch.distributed.get_process_group_ranks(pipeline)[0],
        "schedule": schedule,
        "accumulation": window,
    }


def run_facts(args: Any) -> dict[str, Any]:
    """Return what a comparison has to know of a run, in Megatron's terms, as plain values."""
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    found = place(args)
    if found["schedule"] == "auto":
        found["schedule"] = "interleaved" if chunks > 1 else "1f1b"
    return found | {
        "chunks": chunks,
        "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "data_parallel": parallel_state.get_data_parallel_world_size(),
        "context_parallel": parallel_state.get_context_parallel_world_size(),
        "num_microbatches": get_num_microbatches(),
        "extra_in_flight": args.paci_extra_in_flight,
        "defer_step": args.paci_defer_step,
        "accumulation_schedule": args.paci_accum_schedule,
        "sequence_length": args.seq_length,
        "seed": args.seed,
        "versions": versions(),
    }
