"""An oracle: the whole pipeline replayed in one process, written without the plugin's code.

It knows only the definition: a stage forwards while fewer than N - i of its microbatches wait for
their backward, else takes the oldest backward, and steps after every ``accumulation`` of them. The
stages are real Megatron models with real Megatron optimizers; their messages are plain queues.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque

import torch


class FakePipelineGroup:
    """Tells a model which stage it is."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class ReplayStage:
    """Weights, optimizer and queue of one stage."""

    def __init__(self, index: int, num_stages: int, data_iterator, initial: str):
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.training import get_args, training
        from megatron.training.argument_utils import gpt_config_from_args

        args = get_args()
        model_config = gpt_config_from_args(args)
        self.config = model_config.transformer
        self.config.pipeline_model_parallel_size = num_stages
        self.config.pipeline_dtype = torch.float32
        collection = copy.copy(ProcessGroupCollection.use_mpu_process_groups())
        collection.pp = FakePipelineGroup(index, num_stages)
        builder = model_config.get_builder_cls()(model_config)
        module = builder.build_model(
            collection, pre_process=index == 0, post_process=index == num_stages - 1
        )
        self.model = DistributedDataParallel(
            self.config, training.get_megatron_ddp_config(args), module
        )
        module.load_state_dict(torch.load(f"{initial}.rank{index}.pt", weights_only=False))
        optimizer_config, overrides = training.get_megatron_optimizer_config(args)
        self.optimizer = get_megatron_optimizer(
            optimizer_config, [self.model], config_overrides=overrides
        )
        self.scheduler = training.get_optimizer_param_scheduler(self.optimizer)
        self.depth = num_stages - index
        self.is_last = index == num_stages - 1
        self.data_iterator = data_iterator
        self.waiting: deque = deque()
        self.inputs: deque = deque()
        self.gradients: deque = deque()
        self.forwards = self.backwards = 0
        self.losses: list = []


def replay_training(
    seen: dict, train_args: tuple, *, num_stages: int, accumulation: int, initial: str,
    drain_every: int = 0,
):
    """Replay all iterations; stands in for Megatron's ``train``.

    Args:
        seen: Receives ``losses`` per iteration and, per stage, ``weights`` and ``optimizer``.
        drain_every: Iterations between drains, 0 for one at the end.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    from tests.gloo.worker import digest, optimizer_tensors

    args = get_args()
    forward_step_func, data_iterator = train_args[0], train_args[4]
    # Every stage reads the same samples, as the ranks of a pipeline do.
    iterators = itertools.tee(iter(lambda: next(data_iterator), None), num_stages)
    stages = [ReplayStage(i, num_stages, iterators[i], initial) for i in range(num_stages)]
    microbatches = get_num_microbatches()
    streams = [args.train_iters] if not drain_every else (
        [drain_every] * (args.train_iters // drain_every)
    )
    for iterations in streams:
        run_stream(stages, iterations * microbatches, accumulation, forward_step_func)
    losses = stages[-1].losses
    for start in range(0, len(losses), microbatches):
        total = torch.stack([entry["lm loss"] for entry in losses[start:start + microbatches]])
        total = total.sum(dim=0)
        seen["losses"].append({"lm loss": float(total[0] / total[1])})
    seen["weights"] = [digest(stage.model.parameters()) for stage in stages]
    seen["optimizer"] = [digest(optimizer_tensors(stage.optimizer)) for stage in stages]
    return args.train_iters, 0


def run_stream(stages: list[ReplayStage], total: int, accumulation: int, forward_step_func) -> None:
    """Run ``total`` microbatches through all stages, the pipeline empty before and after."""
    for stage in stages:
        stage.forwards = stage.backwards = 0
    while any(stage.backwards < total for stage in stages):
        moved = False
        for index, stage in enumerate(stages):
            if stage.forwards < total and len(stage.waiting) < stage.depth:
                if index == 0 or stage.inputs:
                    forward(stages, index, accumulation, forward_step_func)
                    moved = True
            elif stage.waiting and (stage.is_last or stage.gradients):
                backward(stages, index, accumulation)
                moved = True
        assert moved, "the replay is stuck"


def forward(stages, index: int, accumulation: int, forward_step_func) -> None:
    from megatron.core.pipeline_parallel.schedules import forward_step

    stage = stages[index]
    received = stage.inputs.popleft() if index else None
    output, _ = forward_step(
        forward_step_func, stage.data_iterator, stage.model, accumulation, received, stage.losses,
        stage.config, cp_group_size=1, is_last_stage=stage.is_last,
    )
    stage.forwards += 1
    stage.waiting.append((received, output))
    if not stage.is_last:
        stages[index + 1].inputs.append(output.detach().clone().requires_grad_())


def backward(stages, index: int, accumulation: int) -> None:
    stage = stages[index]
    received, output = stage.waiting.popleft()
    if stage.backwards % accumulation == 0:
        stage.model.zero_grad_buffer()
        stage.optimizer.zero_grad()
    if received is not None:
        received.retain_grad()
    torch.autograd.backward(output, None if stage.is_last else stage.gradients.popleft())
    if index:
        stages[index - 1].gradients.append(received.grad.clone())
    stage.backwards += 1
    if stage.backwards % accumulation == 0:
        stage.model.finish_grad_sync()
        with torch.autograd._unsafe_preserve_version_counter(tuple(stage.model.parameters())):
            stage.optimizer.step()
        from megatron.training import get_args

        stage.scheduler.step(increment=accumulation * get_args().micro_batch_size)
