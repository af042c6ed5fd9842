"""One of several pipeline stages in a process: Megatron's model and optimizer, PACI's engine."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.training import get_args, training
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.initialize import _set_random_seed

from megatron_paci.compute import MegatronCompute
from megatron_paci.convergence.local import LocalChannel, LocalLink, Queues
from megatron_paci.convergence.variants import StageRates, StashingCompute, use_nadam
from megatron_paci.convergence.window import LocalWindow
from megatron_paci.engine import Engine
from megatron_paci.exit_request import ExitRequest
from megatron_paci.gpt import build_gpt
from megatron_paci.report import Ledger
from megatron_paci.schedule import StageSchedule
from megatron_paci.tied import TiedEmbedding, has_unused_output_weight, tied_parameter


class PlaceInPipeline:
    """Stands for the pipeline's process group where a model asks which stage it is."""

    def __init__(self, rank: int, size: int):
        """Be rank ``rank`` of ``size``."""
        self._rank, self._size = rank, size

    def rank(self) -> int:
        """Return the stage."""
        return self._rank

    def size(self) -> int:
        """Return the number of stages."""
        return self._size


@dataclass(frozen=True)
class TiedQueues:
    """What is under way between the ends of a tied embedding; named as in ``StageGroups``."""

    tied_gradient: deque[torch.Tensor] = field(default_factory=deque)
    tied_weight: deque[torch.Tensor] = field(default_factory=deque)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a run differs from PACI as the product has it; the default is the product."""

    stash: bool = False
    """Backwards take the weights of their forward."""

    nadam: bool = False
    """NAdam in the place of AdamW."""

    rate_samples: int = 0
    """Over how many samples PipeMare's rule for the learning rate fades (``StageRates``)."""


class LocalStage:
    """One stage, built from Megatron's flags as ``megatron.training`` builds it.

    Attributes:
        model: In Megatron's DistributedDataParallel.
        engine: What runs it.
        scheduler: Of the learning rate.
    """

    def __init__(
        self,
        index: int,
        num_stages: int,
        *,
        accumulation: int,
        clip: str,
        previous: Queues | None,
        following: Queues | None,
        tied_queues: TiedQueues,
        variant: Variant,
    ):
        """Build the stage; the process is a job of one rank with its process groups.

        Args:
            clip: As for ``Ledger``.
            previous, following: The links to the neighbours.
            tied_queues: The links between the first and the last stage.
        """
        args = get_args()
        self.config = core_transformer_config_from_args(args)
        self.config.pipeline_model_parallel_size = num_stages
        self.config.pipeline_dtype = torch.bfloat16 if args.bf16 else torch.float32
        self.config.finalize_model_grads_func = finalize_model_grads
        is_first, self.is_last = index == 0, index == num_stages - 1
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.embd = groups.pos_embd = None  # what spans stages
        with _as_stage(index, num_stages):
            _set_random_seed(args.seed)
            placed = copy.copy(groups)
            placed.pp = PlaceInPipeline(index, num_stages)
            gpt = build_gpt(is_first, self.is_last, config=self.config, pg_collection=placed)
        module = Float16Module(self.config, gpt) if args.bf16 else gpt
        self.model = DistributedDataParallel(
            self.config, training.get_megatron_ddp_config(args), module
        )
        optimizer_config, overrides = training.get_megatron_optimizer_config(args)
        self.optimizer = get_megatron_optimizer(
            optimizer_config, [self.model], config_overrides=overrides
        )
        if variant.nadam:
            use_nadam(self.optimizer)
        self.scheduler = training.get_optimizer_param_scheduler(self.optimizer)
        schedule = StageSchedule(index, num_stages, accumulation)
        if variant.rate_samples:
            self.scheduler = StageRates(
                self.scheduler, self.optimizer, delay=(schedule.depth - 1) / accumulation,
                samples=variant.rate_samples,
            )
        self.tied_weight = tied_parameter(self.model) if num_stages > 1 else None
        tied = None
        if self.tied_weight is not None:
            tied = TiedEmbedding(
                self.tied_weight, self.optimizer, tied_queues, self.config,
                is_owner=is_first, make_link=LocalLink,
            )
        self.compute = (StashingCompute if variant.stash else MegatronCompute)(
            self.model, self.config, depth=schedule.depth,
            context_parallel_size=1, is_last_stage=self.is_last,
        )
        self.window = LocalWindow(
            self.model, self.optimizer, self.scheduler, self.config, groups, groups.pp,
            stage=index, ledger=Ledger(clip=clip, is_first=is_first),
            exit_request=ExitRequest(is_first=is_first, local=lambda: 0),
            take_num_tokens=self.compute.take_num_tokens, tied=tied,
            has_unused_weights=has_unused_output_weight(self.model),
        )
        self.window.samples_per_microbatch = args.micro_batch_size
        self.channel = LocalChannel(previous, following)
        self.engine = Engine(
            schedule, compute=self.compute, channel=self.channel, window=self.window
        )

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimizer and learning-rate schedule, after a drain."""
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what ``state_dict`` returned, before the first update."""
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


@contextlib.contextmanager
def _as_stage(index: int, num_stages: int) -> Iterator[None]:
    """Let Megatron's global state say that this rank is stage ``index``.

    Seeds and multi-token prediction ask it and not the groups.
    """
    parallel_state.set_pipeline_model_parallel_rank(index)
    parallel_state.set_pipeline_model_parallel_world_size(num_stages)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_rank(None)
        parallel_state.set_pipeline_model_parallel_world_size(None)
