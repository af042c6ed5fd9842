"""An oracle: the whole pipeline replayed in one process, without the code of the schedule.

It knows only the definition: a stage forwards while fewer than N - i of its microbatches wait for
their backward (or s more for each later stage), else takes the oldest backward, and steps after
every ``accumulation`` of them, at once or right before the next one; and the documented rules of
what a step uses of other stages. The stages are real Megatron models with
real Megatron optimizers; their messages are plain queues. Where stages are spread over several
ranks (tensor, data, context or expert parallel), each of as many processes replays its part of all
stages.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

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
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.module import Float16Module
        from megatron.training import get_args, training
        from megatron.training.arguments import core_transformer_config_from_args

        from megatron_paci.gpt import build_gpt

        args = get_args()
        self.config = core_transformer_config_from_args(args)
        self.config.pipeline_model_parallel_size = num_stages
        self.config.pipeline_dtype = torch.float32
        # As a job with one pipeline stage has them.
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.groups.embd = self.groups.pos_embd = None
        collection = copy.copy(self.groups)
        collection.pp = FakePipelineGroup(index, num_stages)
        # Multi-token prediction asks the global state, not the groups, for the last stage.
        parallel_state.set_pipeline_model_parallel_rank(index)
        parallel_state.set_pipeline_model_parallel_world_size(num_stages)
        module = gpt = build_gpt(
            index == 0, index == num_stages - 1, config=self.config, pg_collection=collection
        )
        parallel_state.set_pipeline_model_parallel_rank(None)
        parallel_state.set_pipeline_model_parallel_world_size(None)
        if args.bf16:
            module = Float16Module(self.config, gpt)
        self.model = DistributedDataParallel(
            self.config, training.get_megatron_ddp_config(args), module
        )
        rank = index * torch.distributed.get_world_size() + torch.distributed.get_rank()
        module.load_state_dict(torch.load(f"{initial}.rank{rank}.pt", weights_only=False))
        optimizer_config, overrides = training.get_megatron_optimizer_config(args)
        self.optimizer = get_megatron_optimizer(
            optimizer_config, [self.model], config_overrides=overrides
        )
        self.scheduler = training.get_optimizer_param_scheduler(self.optimizer)
        self.index = index
        self.is_last = index == num_stages - 1
        self.data_iterator = data_iterator
        self.waiting: deque = deque()
        self.inputs: deque = deque()
        self.gradients: deque = deque()
        self.forwards = self.backwards = self.steps = self.skipped = 0
        self.losses: list = []
        self.owes_step = False
        self.tokens: list[int] = []  # by microbatch, of windows to come
        self.squares: list[float] = []  # by window
        self.window_tokens: list[int] = []
        self.skips: list[bool] = []
        self.tied = None
        shares = gpt.share_embeddings_and_output_weights or self.config.mtp_num_layers
        if shares and (index == 0 or self.is_last):
            self.tied = gpt.shared_embedding_or_output_weight()
            self.tied_gradients: list[torch.Tensor] = []
            self.tied_versions = [self.tied.detach().clone()]


def replay_training(
    seen: dict, train_args: tuple, *, num_stages: int, accumulation: int, initial: str,
    streams: list[list[int]] | None = None, clip: str = "pipelined", poison: dict | None = None,
    extra_in_flight: int = 0, defer_step: bool = False, stash: bool = False,
):
    """Replay all iterations; stands in for Megatron's ``train``.

    Args:
        seen: Receives ``losses`` per iteration and, per stage, ``weights`` and ``optimizer``.
        accumulation: Microbatches per window.
        streams: Instead of one that is drained at the end, several: (iterations, microbatches per
            iteration, microbatches per window) of each.
        clip: Rule of the clipping norm.
        poison: ``stage`` and ``microbatch`` whose backward gives NaN.
        extra_in_flight: More microbatches in flight for each later stage.
        defer_step: Whether a step waits for one more forward.
        stash: Backwards take the weights of their forward, not those of now (eq. 1).
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    from tests.gloo.probes import digest, optimizer_tensors

    args = get_args()
    forward_step_func, data_iterator = train_args[0], train_args[4]
    # Every stage reads the same samples, as the ranks of a pipeline do.
    iterators = itertools.tee(iter(lambda: next(data_iterator), None), num_stages)
    stages = [ReplayStage(i, num_stages, iterators[i], initial) for i in range(num_stages)]
    losses = stages[-1].losses
    streams = streams or [[args.train_iters, get_num_microbatches(), accumulation]]
    for iterations, microbatches, window in streams:
        before = len(losses)
        rules = Rules(
            window, forward_step_func, clip, poison or {}, extra_in_flight, defer_step, stash
        )
        run_stream(stages, iterations * microbatches, rules)
        for start in range(before, len(losses), microbatches):
            total = torch.stack([entry["lm loss"] for entry in losses[start:start + microbatches]])
            total = total.sum(dim=0)
            torch.distributed.all_reduce(total, group=stages[-1].groups.dp_cp)
            seen["losses"].append({"lm loss": float(total[0] / total[1])})
    seen["weights"] = [digest(stage.model.parameters()) for stage in stages]
    seen["buffers"] = [digest(stage.model.module.buffers()) for stage in stages]
    seen["optimizer"] = [digest(optimizer_tensors(stage.optimizer)) for stage in stages]
    seen["skipped"] = [stage.skipped for stage in stages]
    return args.train_iters, 0


@dataclass
class Rules:
    accumulation: int
    forward_step_func: Callable
    clip: str
    poison: dict
    extra_in_flight: int
    defer_step: bool
    stash: bool

    def depth(self, stages: list, index: int) -> int:
        """Return the most microbatches that wait for their backward on a stage."""
        return len(stages) - index + self.extra_in_flight * (len(stages) - 1 - index)


def run_stream(stages: list[ReplayStage], total: int, rules: Rules) -> None:
    """Run ``total`` microbatches through all stages, the pipeline empty before and after."""
    for stage in stages:
        stage.forwards = stage.backwards = 0
        stage.first_window = stage.steps
    while any(stage.backwards < total or stage.owes_step for stage in stages):
        moved = False
        for index, stage in enumerate(stages):
            if stage.forwards < total and len(stage.waiting) < rules.depth(stages, index):
                if index == 0 or stage.inputs:
                    forward(stages, index, rules)
                    moved = True
            elif stage.waiting and (stage.is_last or stage.gradients):
                if stage.owes_step:
                    step(stages, index, total, rules)
                backward(stages, index, rules)
                if stage.backwards % rules.accumulation == 0:
                    stage.owes_step = True
                    if not rules.defer_step:
                        step(stages, index, total, rules)
                moved = True
            elif stage.owes_step and not any(later.owes_step for later in stages[index + 1:]):
                step(stages, index, total, rules)  # no backward follows any more
                moved = True
        assert moved, "the replay is stuck"
    if stages[-1].tied is not None and len(stages) > 1:
        with torch.no_grad():
            stages[-1].tied.copy_(stages[0].tied)


def forward(stages, index: int, rules: Rules) -> None:
    from megatron.core.pipeline_parallel.schedules import forward_step

    stage = stages[index]
    if stage.tied is not None and stage.is_last and index:
        # The copy has the version that the first stage had when it sent this microbatch.
        behind = rules.depth(stages, 0) + rules.defer_step
        version = max(0, stage.forwards + 1 - behind) // rules.accumulation
        with torch.no_grad():
            stage.tied.copy_(stages[0].tied_versions[stage.first_window + version])
    received = stage.inputs.popleft() if index else None
    output, tokens = forward_step(
        rules.forward_step_func, stage.data_iterator, stage.model, rules.accumulation, received,
        stage.losses, stage.config, cp_group_size=stage.groups.cp.size(),
        is_last_stage=stage.is_last,
    )
    stage.forwards += 1
    stage.tokens.append(int(tokens))
    stash = copy.deepcopy(weights(stage)) if rules.stash else None
    stage.waiting.append((received, output, stash))
    if not stage.is_last:
        stages[index + 1].inputs.append(output.detach().clone().requires_grad_())


def weights(stage) -> list[torch.Tensor]:
    return [parameter.data for parameter in stage.model.parameters()]


def set_weights(stage, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(stage.model.parameters(), values, strict=True):
        parameter.data.copy_(value)


def backward(stages, index: int, rules: Rules) -> None:
    stage = stages[index]
    received, output, stash = stage.waiting.popleft()
    if stage.backwards % rules.accumulation == 0:
        stage.model.zero_grad_buffer()
        stage.optimizer.zero_grad()
    if received is not None:
        received.retain_grad()
    if rules.stash:
        now = copy.deepcopy(weights(stage))
        set_weights(stage, stash)
    torch.autograd.backward(output, None if stage.is_last else stage.gradients.popleft())
    if rules.stash:
        set_weights(stage, now)
    gradient = None if received is None else received.grad.clone()
    if rules.poison and (index, stage.backwards) == (
        rules.poison["stage"], rules.poison["microbatch"]
    ):
        next(stage.model.parameters()).main_grad.fill_(math.nan)
        if gradient is not None:
            gradient.fill_(math.nan)
    if index:
        stages[index - 1].gradients.append(gradient)
    stage.backwards += 1


def step(stages, index: int, total: int, rules: Rules) -> None:
    """Update one stage by the documented rules."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.training import get_args

    stage, window = stages[index], stages[index].steps
    last = stages[-1]
    finalize_model_grads([stage.model], None, pg_collection=stage.groups)
    if stage.tied is not None and len(stages) > 1:
        if stage.is_last:
            stage.tied_gradients.append(stage.tied.main_grad.clone())
        else:
            stage.tied.main_grad.add_(last.tied_gradients[window])
    if stage.config.calculate_per_token_loss:
        if stage.is_last:
            stage.window_tokens.append(sum(stage.tokens[:rules.accumulation]))
            del stage.tokens[:rules.accumulation]
        tokens = torch.tensor(last.window_tokens[window])
        torch.distributed.all_reduce(tokens, group=stage.groups.dp_cp)
        stage.model.scale_gradients(1.0 / tokens)
    stage.optimizer.prepare_grads()
    copy_of_first = stage.tied if stage.is_last and index else None
    own_norm = float(stage.optimizer.get_grad_norm())
    stage.squares.append(own_norm * own_norm)
    later = 0.0
    for other in reversed(stages[index + 1:]):
        later = other.squares[window] + later
    # The newest window whose report has come down: it rides with the first forward after the
    # first stage's step, and no forward comes any more at the end of the stream.
    in_stream = window - stage.first_window
    depth = rules.depth(stages, 0)
    newest = min(
        in_stream - math.ceil((depth - rules.depth(stages, index) + 1) / rules.accumulation),
        (total - depth - rules.defer_step) // rules.accumulation - 1,
    )
    norm = own_norm
    if rules.clip == "pipelined" and (index < len(stages) - 1 or (newest >= 0 and index)):
        earlier = 0.0
        if newest >= 0 and index:
            known = [
                sum(other.squares[w] for other in stages[:index])
                for w in range(stage.first_window, stage.first_window + newest + 1)
            ]
            finite = [value for value in known if math.isfinite(value)]
            earlier = finite[-1] if finite else 0.0
        own = own_norm * own_norm
        norm = math.sqrt((own + later if index < len(stages) - 1 else own) + earlier)
    skip = not math.isfinite(own_norm) or any(
        other.skips[window] for other in stages[index + 1:]
    )
    stage.skips.append(skip)
    stage.skipped += skip
    if not skip:
        max_norm = get_args().clip_grad
        if max_norm > 0:
            clip_grad_by_total_norm_fp32(stage.optimizer.get_parameters(), max_norm, norm)
        kept = None if copy_of_first is None else copy_of_first.detach().clone()
        with torch.autograd._unsafe_preserve_version_counter(tuple(stage.model.parameters())):
            stage.optimizer.step_with_ready_grads()
            if kept is not None:  # updated by its owner alone
                copy_of_first.data.copy_(kept)
    samples = get_args().micro_batch_size * stage.groups.dp.size()
    stage.scheduler.step(increment=rules.accumulation * samples)
    stage.steps += 1
    stage.owes_step = False
    if stage.tied is not None and index == 0:
        stage.tied_versions.append(stage.tied.detach().clone())
