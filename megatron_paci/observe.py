"""What an observed run does besides training: a trace (trace_file.py), figures for the log."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.training import get_args
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron_paci.instrument import Instrument, device_clock
from megatron_paci.run_facts import place
from megatron_paci.telemetry import NAMES
from megatron_paci.timeline import Timeline
from megatron_paci.trace_file import TraceWriter


def wants_telemetry(args: Any) -> bool:
    """Whether the arguments ask for the figures of every stage."""
    if args.paci_telemetry == "auto":
        return bool(args.tensorboard_dir or getattr(args, "wandb_project", None))
    return args.paci_telemetry == "on"


def observer(model: torch.nn.Module, optimizer: Any, stage: Any) -> Observer | None:
    """Return an observer of this rank's training if the arguments ask for anything, else None."""
    args = get_args()
    telemetry = stage is not None and stage.telemetry is not None
    if not (telemetry or getattr(args, "paci_trace", None)):
        return None
    return Observer(model, optimizer, stage)


class Observer:
    """Observes the training of this rank until it is closed."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, stage: Any):
        """Start.

        Args:
            model: The rank's (first) model chunk.
            stage: The ``MegatronStage`` under PACI, else None.

        Raises:
            OSError: The folder of the trace cannot be written to.
        """
        args = get_args()
        self._stage = stage
        self._writer = None
        started = time.time()
        self._timeline = Timeline(device_clock(next(model.parameters())))
        if args.paci_trace:
            self._writer = TraceWriter(args.paci_trace, place(args) | {"started": started})
        self._instrument = Instrument(self._timeline, optimizer, stage)

    def span(self, kind: str) -> AbstractContextManager:
        """Return a context that is one span of the time line."""
        return self._timeline.span(kind)

    def iteration(self, losses: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
        """Take the end of an iteration.

        Args:
            losses: What the training step returns for the log.
            number: Of the iteration, from 1.

        Returns:
            ``losses``, on the logging rank with what belongs in the log line.
        """
        self._instrument.end_iteration()
        self._collect()
        telemetry = self._stage and self._stage.telemetry
        if telemetry is None or not self._stage.is_last_stage or self._stage.suspended:
            return losses
        stages = telemetry.stages
        _write_figures(stages, number)
        device = torch.cuda.current_device()
        line = {
            "paci drift": max(each.drift_max for each in stages),
            "paci idle": max(each.idle_fraction for each in stages),
        }
        return losses | {name: torch.tensor([value], device=device) for name, value in line.items()}

    def close(self) -> None:
        """Stop observing and write what is left."""
        self._instrument.close()
        self._collect(wait=True)
        if self._writer is not None:
            self._writer.close()

    def _collect(self, *, wait: bool = False) -> None:
        spans = self._timeline.take(wait=wait)
        if self._writer is not None:
            self._writer.write(spans)
        if self._stage is not None and self._stage.telemetry is not None:
            self._stage.telemetry.idle.add(spans)


def _write_figures(stages: list[Any], iteration: int) -> None:
    """Write the figures of all stages to TensorBoard and Weights & Biases, as often as Megatron."""
    if iteration % get_args().tensorboard_log_interval:
        return
    figures = {
        f"paci {name}/stage {stage}": getattr(each, name)
        for stage, each in enumerate(stages)
        for name in NAMES
    }
    if (writer := get_tensorboard_writer()) is not None:
        for name, value in figures.items():
            writer.add_scalar(name, value, iteration)
    if (wandb := get_wandb_writer()) is not None:
        wandb.log(figures, iteration)
