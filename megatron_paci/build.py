"""Puts an engine together for one stage of a Megatron job, and takes it apart again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_paci.activity import Activity
from megatron_paci.channel import PipelineChannel
from megatron_paci.compute import MegatronCompute
from megatron_paci.engine import Engine
from megatron_paci.exit_request import ExitRequest
from megatron_paci.groups import (
    connect,
    create_group_within_stage,
    create_stage_groups,
    destroy_groups,
)
from megatron_paci.loss_warning import LossWarning
from megatron_paci.report import EXIT_ON_DURATION, EXIT_ON_SIGNAL, Ledger
from megatron_paci.router_metrics import RouterMetrics
from megatron_paci.schedule import StageSchedule
from megatron_paci.stage_local import (
    StageLocalStatistics,
    groups_of_passes,
    stage_local_collection,
)
from megatron_paci.telemetry import Telemetry
from megatron_paci.tied import TiedEmbedding, has_unused_output_weight, tied_parameter
from megatron_paci.window import MegatronWindow


class MegatronStage:
    """One pipeline stage of a Megatron job under PACI: the engine and all it was built from.

    Attributes:
        activity: What the rank is doing, for messages and the watchdog.
        suspended: Whether Megatron trains by itself for now, see ``suspend``.
    """

    def __init__(
        self,
        model: list[torch.nn.Module] | torch.nn.Module,
        optimizer: Any,
        scheduler: Any,
        *,
        accumulation: int,
        extra_in_flight: int = 0,
        defer_step: bool = False,
        clip: str = "pipelined",
        nonfinite: str = "skip",
        pg_collection: ProcessGroupCollection | None = None,
        timeout: timedelta | None = None,
        telemetry: bool = False,
        exit_wishes: Callable[[], int] | None = None,
    ):
        """Create the communicators and the engine; all ranks of the job have to do so.

        Args:
            model: The rank's only model chunk, wrapped in Megatron's DistributedDataParallel.
            optimizer: Megatron optimizer over its parameters. Its gradient statistics become
                stage-local until ``close``.
            scheduler: ``OptimizerParamScheduler`` or None.
            accumulation: Backward passes per optimizer step.
            extra_in_flight: More microbatches in flight for each link between a stage and the last
                one, see ``schedule.StageSchedule``; the same on all ranks, like ``accumulation``.
            defer_step: Whether a step waits for one more forward, likewise.
            clip: What ``--paci-clip`` says, see ``report.Ledger``.
            nonfinite: ``skip`` or ``abort``, what to do with a gradient that is not finite.
            pg_collection: Process groups of this rank; None for Megatron's global ones.
            timeout: Time after which a message that does not come is an error.
            telemetry: Whether stages pass figures for the log down the pipeline (telemetry.py).
            exit_wishes: Returns bits ``report.EXIT_ON_*`` when this rank wants training to end;
                None where nobody will, which spares replicas to agree.

        Raises:
            ValueError: There is more than one model chunk.
        """
        chunks = model if isinstance(model, list) else [model]
        if len(chunks) != 1:
            raise ValueError(f"PACI runs one model chunk per rank, got {len(chunks)}")
        self.model = chunks[0]
        self.config = schedules.get_model_config(self.model)
        self._message_shape: tuple[int, ...] = ()
        self._num_microbatches: int | None = None
        self._skipped_before = 0
        self.suspended = False
        self._collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        pipeline = self._collection.pp
        schedule = StageSchedule(
            pipeline.rank(), pipeline.size(), accumulation, extra_in_flight, defer_step
        )
        is_first = schedule.stage == 0
        self.is_last_stage = schedule.stage == schedule.num_stages - 1
        self.data_parallel_group = self._collection.dp_cp
        tied = tied_parameter(self.model)
        has_routers = getattr(self.config, "num_moe_experts", None) is not None
        self._groups = create_stage_groups(
            pipeline,
            tied=tied is not None,
            shapes=self.config.variable_seq_lengths,
            metrics=has_routers,
            telemetry=telemetry,
            timeout=timeout,
        )
        self._statistics = StageLocalStatistics(
            optimizer, lambda group: create_group_within_stage(group, pipeline, timeout=timeout)
        )
        self.stage_collection = stage_local_collection(self._collection, self._groups.alone)
        connect([
            self._groups.alone,
            *self._statistics.groups,
            *groups_of_passes(self.model, self._collection),
        ])
        self._tied = None
        if tied is not None and self._groups.tied_weight is not None:
            self._tied = TiedEmbedding(
                tied,
                optimizer,
                self._groups,
                self.config,
                is_owner=is_first,
            )
            self._tied.drop_state()
        self.exit_request = (
            ExitRequest(is_first=is_first, local=lambda: 0)
            if exit_wishes is None
            else ExitRequest(is_first=is_first, local=exit_wishes, agree=self._join_over_replicas)
        )
        self.compute = MegatronCompute(
            self.model,
            self.config,
            depth=schedule.depth,
            context_parallel_size=self._collection.cp.size(),
            is_last_stage=self.is_last_stage,
        )
        self.window = MegatronWindow(
            self.model,
            optimizer,
            scheduler,
            self.config,
            self.stage_collection,
            pipeline,
            stage=schedule.stage,
            ledger=Ledger(clip=clip, is_first=is_first),
            exit_request=self.exit_request,
            take_num_tokens=self.compute.take_num_tokens,
            tied=self._tied,
            has_unused_weights=has_unused_output_weight(self.model),
            abort_on_nonfinite=nonfinite == "abort",
        )
        channel = PipelineChannel(
            self._groups, self.config, shape=lambda: self._message_shape
        )
        self.engine = Engine(
            schedule, compute=self.compute, channel=channel, window=self.window
        )
        self.activity = Activity(pipeline, self.engine)
        self.telemetry = (
            Telemetry(self._groups, self.config, self.engine, self.window) if telemetry else None
        )
        is_logging = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        # Without other stages no gradient is late.
        self.loss_warning = LossWarning() if is_logging and schedule.num_stages > 1 else None
        routers = RouterMetrics(self._groups, self.config) if has_routers else None
        self._passed_down = [each for each in (routers, self.telemetry) if each is not None]

    def _join_over_replicas(self, requests: int) -> int:
        """Return the bits that any replica of this stage has set."""
        group = self._collection.dp_cp
        if group.size() == 1:
            return requests
        bits = torch.tensor(
            [requests & EXIT_ON_SIGNAL, requests & EXIT_ON_DURATION],
            device=torch.cuda.current_device(),
        )
        torch.distributed.all_reduce(bits, op=torch.distributed.ReduceOp.MAX, group=group)
        return int(bits.sum())

    def run(
        self,
        forward_step_func: Any,
        data_iterator: Any,
        num_microbatches: int,
        *,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
    ) -> list[Any]:
        """Run the forwards of ``num_microbatches`` and what falls between them (``Engine.run``).

        A change of ``num_microbatches`` from one call to the next drains the stream first.

        Returns:
            What the loss function returned for logging, one entry per microbatch, on the last
            stage; an empty list elsewhere.
        """
        if num_microbatches != self._num_microbatches:
            self.drain()
            self._num_microbatches = num_microbatches
        self.window.samples_per_microbatch = micro_batch_size * self._collection.dp.size()
        self._message_shape = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=self.config,
            tp_group=self._collection.tp,
            cp_group=self._collection.cp,
        )[0]
        self.compute.bind(forward_step_func, data_iterator, self.engine.schedule.accumulation)
        self.activity.beat(iterations=1)
        with self.activity.doing("training"):
            self.engine.run(num_microbatches)
            for each in self._passed_down:
                each.end_run()
        return self.compute.forward_data

    def has_skipped(self) -> bool:
        """Whether a window was left out since this was asked last; a drain may have done so."""
        before, self._skipped_before = self._skipped_before, self.window.skipped
        return self.window.skipped > before

    def set_accumulation(self, accumulation: int) -> None:
        """Change the window length, after a drain; without effect if it is the same."""
        if accumulation != self.engine.schedule.accumulation:
            self.drain()
            self.engine.set_accumulation(accumulation)

    def drain(self) -> None:
        """Run the outstanding backwards and steps of the stage (``Engine.drain``)."""
        if self.engine.streaming:
            with self.activity.doing("draining the pipeline"):
                self.engine.drain()
                for each in self._passed_down:
                    each.end_drain()

    def suspend(self) -> None:
        """Drain, and leave training to Megatron's own schedule until ``resume``.

        The model and the optimizer are then as without PACI. All ranks of the job have to do so;
        without effect on a suspended stage.
        """
        if not self.suspended:
            self.drain()
            self.lend_tied_state()
            self._statistics.undo()
            self.suspended = True

    def resume(self) -> None:
        """Train by PACI again, after ``suspend``."""
        if self.suspended:
            self._statistics.redo()
            if self._tied is not None:
                self._tied.drop_state()
            self.suspended = False

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Drain; while it lasts every optimizer state that Megatron stores is there."""
        self.drain()
        with self.activity.doing("saving a checkpoint"):
            self.lend_tied_state()
            yield
            if self._tied is not None and not self.suspended:
                self._tied.drop_state()

    def lend_tied_state(self) -> None:
        """Complete the optimizer state, after a drain; all ranks of the job have to do so."""
        if self._tied is not None and not self.suspended:
            self._tied.lend_state()

    def close(self) -> None:
        """Undo what building changed. Microbatches still in flight are dropped: drain first."""
        self.engine.close()
        self._statistics.undo()

    def destroy_groups(self) -> None:
        """Destroy the communicators; all ranks of the job have to do so, after a drain."""
        destroy_groups([*vars(self._groups).values(), *self._statistics.groups])


_installed: MegatronStage | None = None


def install_stage(stage: MegatronStage | None) -> None:
    """Make ``stage`` the one that the schedule function drives; None takes it out.

    Raises:
        RuntimeError: Another one is installed.
    """
    global _installed
    if stage is not None and _installed is not None:
        raise RuntimeError("a PACI stage is installed already; close it and take it out first")
    _installed = stage


def installed_stage() -> MegatronStage | None:
    """Return this process's stage, or None outside of PACI training."""
    return _installed
