"""The window: ``accumulation`` backward passes, then one optimizer step of this stage alone.

A stage updates like a Megatron job with one pipeline stage: the same gradient finalization, the
same optimizer, the same clipping function, on groups that do not leave the stage. What it has to
know of other stages comes with reports (report.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_paci.exit_request import ExitRequest
from megatron_paci.loss_scale import LossScale
from megatron_paci.optimizers import optimizer_parts, take_back_steps
from megatron_paci.report import Ledger, Report
from megatron_paci.schedule import StageSchedule
from megatron_paci.tied import TiedEmbedding

logger = logging.getLogger(__name__)


class NonFiniteGradient(RuntimeError):
    """A gradient is not finite and ``--paci-nonfinite abort`` is given."""


class MegatronWindow:
    """Updates the weights of one model chunk; implements ``protocols.Window``.

    Attributes:
        ledger: What this stage knows of the gradients of all stages.
        skipped: Windows whose step was not taken because a gradient was not finite.
        partial: Windows that this stage has stepped and an earlier stage has skipped.
        clip_coefficient: What the gradients of the last window were multiplied with by clipping.
        samples_per_microbatch: Samples that one microbatch takes from the data set, over all
            replicas; the unit of Megatron's learning-rate schedule.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        scheduler: Any,
        config: Any,
        pg_collection: ProcessGroupCollection,
        pipeline: torch.distributed.ProcessGroup,
        *,
        stage: int,
        ledger: Ledger,
        exit_request: ExitRequest,
        take_num_tokens: Callable[[int], int],
        tied: TiedEmbedding | None = None,
        has_unused_weights: bool = False,
        abort_on_nonfinite: bool = False,
    ):
        """Keep references; nothing is changed yet.

        Args:
            scheduler: Megatron's ``OptimizerParamScheduler`` or None.
            pg_collection: Groups of this rank that hold no rank of another stage.
            pipeline: The stages of this rank's pipeline, used at drains alone.
            stage: Index of this stage, for messages.
            take_num_tokens: Returns the loss tokens of so many microbatches, the oldest that it was
                not called for; asked on the last stage only.
            tied: The tied word embedding, None if this stage holds no copy of one.
            has_unused_weights: Whether a weight never gets a gradient. Megatron overlaps reductions
                with the backward only if all do; else they start after it.
            abort_on_nonfinite: Raise instead of skipping a window.
        """
        self._model = model
        self._optimizer = optimizer
        self._parts = optimizer_parts(optimizer)
        self._loss_scale = LossScale(self._parts)
        self._scheduler = scheduler
        self._config = config
        self._pg_collection = pg_collection
        self._pipeline = pipeline
        self._stage = stage
        self._exit_request = exit_request
        self._take_num_tokens = take_num_tokens
        self._tied = tied
        self._has_unused_weights = has_unused_weights
        self._abort_on_nonfinite = abort_on_nonfinite
        self._parameters = tuple(model.parameters())
        self._no_sync: AbstractContextManager | None = None
        self._open = False
        self._skip = False
        ddp_config = getattr(model, "ddp_config", None)
        self._gathers_late = getattr(ddp_config, "overlap_param_gather", False)
        self._gathered = True
        self._accumulation = 1
        self.ledger = ledger
        self.samples_per_microbatch = 1
        self.skipped = 0
        self.partial = 0
        self.clip_coefficient = 1.0
        self._steps_ahead = 0

    def begin_stream(self, schedule: StageSchedule) -> None:
        """Take the window length of the stream that begins."""
        self._accumulation = schedule.accumulation
        if self._tied is not None:
            self._tied.begin_stream(schedule)

    def prepare(self, last: bool) -> None:
        """Ready the gradient buffers for a backward; the window's last one starts reductions."""
        if not self._open:
            self._model.zero_grad_buffer()
            self._optimizer.zero_grad()
            self._open = True
            self._loss_scale.lower()
        if last and self._tied is not None:
            self._tied.expect_gradient()
        if last and not self._has_unused_weights:
            self._allow_reduction()
        elif self._no_sync is None and self._config.no_sync_func is not None:
            self._no_sync = self._config.no_sync_func()
            self._no_sync.__enter__()

    def gather_weights(self) -> None:
        """Complete an update that the next forward was to gather (``overlap_param_gather``).

        For what uses the weights before or without that forward.
        """
        if self._gathers_late and not self._gathered:
            self._model.start_param_sync(force_sync=True)
        self._weights_are_whole()

    def close(self, window: int, later: Report | None) -> Report:
        """Complete the gradients of the window; return the report over this and later stages."""
        self._allow_reduction()
        self._config.finalize_model_grads_func(
            [self._model], None, pg_collection=self._pg_collection
        )
        if self._tied is not None:
            self._tied.join_gradients()
        num_tokens = 0
        if self._config.calculate_per_token_loss:
            num_tokens = (
                self._take_num_tokens(self._accumulation) if later is None else later.num_tokens
            )
            self._scale_by_tokens(num_tokens)
        loss_scale = self._loss_scale.fix(later)
        overflow = self._optimizer.prepare_grads()
        if self._tied is not None:
            self._tied.leave_to_owner()
        norm = math.inf if overflow else float(self._optimizer.get_grad_norm())
        finite = math.isfinite(norm * norm)
        skipped_later = later is not None and later.skipped > 0
        self._skip = not finite or skipped_later
        counts_zeros = finite and self._optimizer.config.log_num_zeros_in_grad
        own = Report(
            window=window,
            sum_of_squares=norm * norm,
            num_zeros=float(self._optimizer.count_zeros()) if counts_zeros else 0.0,
            skipped=int(self._skip),
            num_tokens=num_tokens,
            loss_scale=loss_scale,
            requests=self._exit_request.wishes(),
        )
        report = self.ledger.close(own, later, norm)
        self._exit_request.hear_wishes(report.requests)
        if self._skip:
            self.skipped += 1
            if not skipped_later:  # else the later stage has said so already
                self._report_not_finite(window, norm)
        return report

    def step(self) -> None:
        """Clip and update the weights unless the window is skipped; advance the schedules."""
        if not self._skip:
            self._clip()
            # Microbatches in flight have saved these parameters for their backward, which is to
            # use them as they are then (eq. 1); autograd would take the update for an accident.
            with torch.autograd._unsafe_preserve_version_counter(self._parameters):
                self._optimizer.step_with_ready_grads()
            self._gathered = False
        # By samples consumed, not by steps that succeeded: else stages would part.
        if self._scheduler is not None:
            self._scheduler.step(increment=self._accumulation * self.samples_per_microbatch)
        if self._tied is not None:
            self._tied.stepped()
        if not self._gathers_late:
            self._weights_are_whole()
        elif not self._forwards_gather:
            self.gather_weights()
        self._open = False

    def hear(self, earlier: Report | None) -> None:
        """Take what the earlier stages say about an older window, and the weight they own."""
        if earlier is not None:
            if self.ledger.hear(earlier):
                self._note_partial(earlier)
            self._exit_request.hear_decision(earlier.requests)
        if self._tied is not None:
            self._tied.take_weight()

    def tell(self, window: int) -> Report:
        """Return the report of ``window`` over this and earlier stages."""
        self._weights_are_whole()  # by the forward that this report goes behind
        return replace(self.ledger.tell(window), requests=self._exit_request.announce())

    def settle(self) -> None:
        """At a drain tell each other what reports had no time to carry.

        All stages are at the same point then, so this is the place for a collective: windows that
        some stage has skipped, wishes to end training, and the fp16 scale for the checkpoint.
        """
        if self._tied is not None:
            self.gather_weights()
            self._tied.settle()
        own = {
            "reports": self.ledger.outstanding(),
            "requests": self._exit_request.wishes(),
        }
        stages: list[Any] = [None] * self._pipeline.size()
        torch.distributed.all_gather_object(stages, own, group=self._pipeline)
        for partial in self.ledger.settle([stage["reports"] for stage in stages]):
            self._note_partial(partial)
        # A checkpoint stores one count of steps for all stages, which is that of stage 0.
        if self._steps_ahead:
            take_back_steps(self._optimizer, self._steps_ahead)
            self._steps_ahead = 0
        for stage in stages:
            self._exit_request.hear_wishes(stage["requests"])
        self._exit_request.decide()
        self._loss_scale.settle(self._pipeline)

    @property
    def _forwards_gather(self) -> bool:
        """Whether forwards wait for gathered weights; Megatron turns that off now and then."""
        return bool(getattr(self._model, "remove_forward_pre_hook_handles", None))

    def _weights_are_whole(self) -> None:
        self._gathered = True
        if self._tied is not None:
            self._tied.weight_is_whole()

    def _clip(self) -> None:
        max_norm = self._optimizer.config.clip_grad
        if max_norm <= 0.0:
            return
        self.clip_coefficient = min(1.0, max_norm / (self.ledger.grad_norm + 1e-6))
        for part in self._parts:
            if not part.is_stub_optimizer and (parameters := part.get_parameters()):
                clip_grad_by_total_norm_fp32(
                    parameters, max_norm=max_norm, total_norm=self.ledger.grad_norm
                )

    def _scale_by_tokens(self, num_tokens: float) -> None:
        """Divide the gradients by the window's tokens, over all replicas."""
        total = torch.tensor(int(num_tokens), dtype=torch.int, device=torch.cuda.current_device())
        torch.distributed.all_reduce(total, group=self._pg_collection.dp_cp)
        self._model.scale_gradients(1.0 / torch.clamp(total, min=1))

    def _allow_reduction(self) -> None:
        if self._no_sync is not None:
            self._no_sync.__exit__(None, None, None)
            self._no_sync = None

    def _report_not_finite(self, window: int, norm: float) -> None:
        message = f"stage {self._stage}, window {window}: the norm of the gradient is {norm}"
        if self._abort_on_nonfinite:
            raise NonFiniteGradient(
                f"{message}; --paci-nonfinite abort ends training, skip would leave out this update"
            )
        logger.warning("%s, the update is left out, on earlier stages too", message)

    def _note_partial(self, report: Report) -> None:
        """An overflow that began in an earlier stage's backward, after this stage had stepped."""
        self.partial += 1
        self._steps_ahead += 1
        self._loss_scale.hear_overflow()
        logger.warning(
            "stage %d, window %d: partial update, %d earlier stages have left it out",
            self._stage, report.window, report.skipped,
        )
