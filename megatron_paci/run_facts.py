"""What a rank knows of its run: its place in it, the schedule, sizes, versions."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_paci.arguments import selected_schedule
from megatron_paci.version import versions


def place(args: Any) -> dict[str, Any]:
    """Return where this rank stands in the job, and under which schedule.

    ``replica`` tells the pipelines of a job apart: it is the first rank of this one.
    ``accumulation`` is the window of PACI, None under other schedules.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    schedule = selected_schedule(args)
    window = args.paci_accum or get_num_microbatches() if schedule == "paci" else None
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
        "sequence_length": args.seq_length,
        "seed": args.seed,
        "versions": versions(),
    }
