"""One training iteration under PACI, with the signature and the result of Megatron's train_step."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args

from megatron_paci.accumulation import accumulation_at
from megatron_paci.build import installed_stage


def paci_train_step(
    forward_step_func,
    data_iterator,
    model,
    optimizer,
    opt_param_scheduler,
    config,
    forward_backward_func,
    iteration=None,
    pg_collection=None,
    p2p_communicator=None,
):
    """Run one iteration; the optimizer steps once per window, inside the schedule.

    Megatron's step reduces the outcome over all stages (skipped steps, gradient norm); here a stage
    counts the windows it has skipped, and the norm comes along the pipeline.

    Returns:
        ``(losses, skipped, should_checkpoint, should_exit, exit_code, grad_norm, num_zeros,
        max_attention_logit)`` like Megatron's train_step. ``losses`` is filled on the last stage
        and covers exactly the microbatches of this iteration, since that stage never lags.
        ``grad_norm`` is that of all stages' gradients in the newest window for which this stage
        knows it: on the first stage the last one it has stepped, on others a few windows ago.
    """
    args = get_args()
    stage = installed_stage()
    num_microbatches = get_num_microbatches()
    stage.set_accumulation(accumulation_at(args, args.consumed_train_samples, num_microbatches))
    losses = forward_backward_func(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.decoder_seq_length,
        forward_only=False,
        pg_collection=pg_collection,
        p2p_communicator=p2p_communicator,
    )
    if iteration is not None and iteration + 1 >= args.train_iters:
        stage.drain()
    # Freeing memory waits for the whole device, in the stream for messages of other stages, too.
    if args.empty_unused_memory_level >= 1 and not stage.engine.streaming:
        torch.cuda.empty_cache()
    averages = average_losses(losses, stage.data_parallel_group) if stage.is_last_stage else {}
    if averages and stage.loss_warning is not None:
        stage.loss_warning.iteration(args.curr_iteration + 1, averages, stage.engine.schedule)
    totals = stage.window.ledger.newest
    return (
        averages,
        int(stage.has_skipped()),
        False,
        False,
        0,
        totals.grad_norm if totals and math.isfinite(totals.grad_norm) else None,
        totals and totals.num_zeros if args.log_num_zeros_in_grad else None,
        0,
    )


def average_losses(
    losses: list[dict[str, torch.Tensor]], data_parallel_group: Any
) -> dict[str, torch.Tensor]:
    """Average the logged losses of an iteration as Megatron does.

    Args:
        losses: One dictionary per microbatch. A value of two elements is (sum over tokens, number
            of tokens), one of a single element is a mean already.
        data_parallel_group: Group over which sums and counts are added up.
    """
    averages = {}
    for key in losses[0] if losses else ():
        values = torch.stack([entry[key].view(-1) for entry in losses])
        if values.shape[1] == 2:
            total = values.sum(dim=0)
            torch.distributed.all_reduce(total, group=data_parallel_group)
            averages[key] = total[0] / total[1]
        elif values.shape[1] == 1:
            averages[key] = values.mean()
        else:
            raise ValueError(
                f"loss {key!r} has {values.shape[1]} elements; expected a mean, or sum and count"
            )
    return averages
