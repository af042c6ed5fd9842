"""The schedule function, with the keyword-only signature of Megatron's own schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_paci.build import installed_stage


def forward_backward_pipelining_paci(
    *,
    forward_step_func: Callable,
    data_iterator: Iterator | list[Iterator],
    model: torch.nn.Module | list[torch.nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable | None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Run one iteration of the PACI stream (arXiv 2606.07881) on this stage.

    The iteration makes ``num_microbatches`` forwards and, once the pipeline has filled, as many
    backwards, which lag by up to ``N - 1 - stage`` microbatches. Unlike after Megatron's schedules
    the optimizer has stepped already when this returns, once per window of backwards.

    With ``forward_only`` the stream is drained and Megatron's own schedule does the work; likewise
    while the stage is suspended (a synchronous phase).

    Args:
        forward_step_func: As for Megatron's schedules.
        data_iterator: Likewise; a list must hold one iterator.
        model: Likewise; a list must hold one chunk, the one the installed stage was built for.
        num_microbatches: Forwards to run; a multiple of the accumulation.
        seq_length: Tokens per sequence.
        micro_batch_size: Sequences per microbatch.
        decoder_seq_length: Tokens per decoder sequence, where it differs.

    Returns:
        On the last stage what the loss function returned for logging, one entry per microbatch;
        elsewhere an empty list.

    Raises:
        RuntimeError: No stage is installed, so there is no optimizer to step.
        ValueError: An argument asks for something only Megatron's schedules do.
    """
    stage = installed_stage()
    if forward_only or (stage is not None and stage.suspended):
        if stage is not None:
            stage.drain()
            stage.activity.beat(iterations=not forward_only)
        return _megatron_schedule(model, pg_collection)(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
            p2p_communicator=p2p_communicator,
            pg_collection=pg_collection,
            force_all_reduce=force_all_reduce,
        )
    if stage is None:
        raise RuntimeError(
            "PACI steps the optimizer inside the schedule, but no stage is installed: build a "
            "megatron_paci.build.MegatronStage with the model and its optimizer and pass it to "
            "install_stage() first (megatron.training's train() does this by itself once "
            "megatron_paci.install() was called before)"
        )
    unsupported = {
        "collect_non_loss_data": collect_non_loss_data,
        "adjust_tensor_shapes_fn": adjust_tensor_shapes_fn,
        "p2p_communicator": p2p_communicator,
        "force_all_reduce": force_all_reduce,
    }
    if given := [name for name, value in unsupported.items() if value]:
        raise ValueError(f"not supported by the PACI schedule: {', '.join(given)}")
    if _only(model) is not stage.model:
        raise ValueError("the installed PACI stage was built for another model")
    return stage.run(
        forward_step_func,
        _only(data_iterator),
        num_microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
    )


def _only(item: Any) -> Any:
    """Return the only entry of a list, or what is no list as it is."""
    if not isinstance(item, list):
        return item
    if len(item) != 1:
        raise ValueError(f"PACI runs one model chunk per rank, got {len(item)}")
    return item[0]


def _megatron_schedule(model: Any, pg_collection: Any) -> Callable:
    """Return the schedule Megatron takes for one model chunk per rank."""
    pipeline = (pg_collection or ProcessGroupCollection.use_mpu_process_groups()).pp
    if pipeline.size() > 1:
        return schedules.forward_backward_pipelining_without_interleaving
    return schedules.forward_backward_no_pipelining
