"""Figures of every stage for Megatron's log, TensorBoard and Weights & Biases.

Megatron writes them on the last rank alone. So at the end of each iteration a stage adds its own
figures to those of the earlier stages and passes them on, down the pipeline, like router metrics:
no collective over stages, and nobody waits for a later stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch

from megatron_paci.groups import StageGroups
from megatron_paci.link import Link
from megatron_paci.timeline import Span

IDLE = ("wait", "settle")


@dataclass(frozen=True)
class StageFigures:
    """One stage in one iteration. Travels as a float64 vector."""

    updates: float
    """Optimizer steps since training began, skipped ones included."""
    drift_max: float
    """Most steps that lay between the forward and the backward of a microbatch."""
    drift_mean: float
    queue_depth: float
    """Most microbatches in flight."""
    idle_fraction: float
    """Part of the time that went by waiting for messages; on a GPU of the iteration before."""
    clip_coefficient: float
    """What the gradients of the last window were multiplied with: 1 if they were not clipped."""
    norm_lag: float
    """Windows between the last one stepped and the newest whose norm is known over all stages."""
    skipped: float
    """Windows left out so far because a gradient was not finite."""
    partial: float
    """Windows stepped so far that an earlier stage has left out."""


NAMES = tuple(field.name for field in fields(StageFigures))


class IdleTime:
    """The share of waiting in the time between the ends of two iterations."""

    def __init__(self):
        self._idle = 0.0
        self._since = 0.0
        self.fraction = 0.0

    def add(self, spans: Iterable[Span]) -> None:
        """Take the spans that are over, in order."""
        for span in spans:
            if span.kind in IDLE:
                self._idle += span.seconds
            elif span.kind == "iteration":
                self.fraction = self._idle / max(span.end - self._since, 1e-9)
                self._idle, self._since = 0.0, span.end


class Telemetry:
    """Collects the figures of a stage and passes them down the pipeline.

    Attributes:
        stages: On the last stage the figures of all stages in the last iteration.
    """

    def __init__(self, groups: StageGroups, config: Any, engine: Any, window: Any):
        """Set up the links; nothing is posted yet.

        Args:
            groups: Communicators, created with ``telemetry=True``.
            config: Megatron's model configuration.
            engine: The engine of this stage.
            window: Its ``MegatronWindow``.
        """

        def link(group: torch.distributed.ProcessGroup | None) -> Link | None:
            return None if group is None else Link(group, config, dtype=torch.float64)

        self._in = link(groups.telemetry_from_previous)
        self._out = link(groups.telemetry_to_next)
        self._engine = engine
        self._window = window
        self._runs = 0
        self._drifts: Counter[int] = Counter()
        self.idle = IdleTime()
        self.stages: list[StageFigures] = []

    @torch.no_grad()
    def end_run(self) -> None:
        """Add this stage's figures to those of the earlier ones and pass them on."""
        rows = []
        if self._in is not None:
            self._in.post_receive((self._engine.schedule.stage, len(NAMES)))
            rows = self._in.take().tolist()
        rows.append(list(astuple(self._own())))
        if self._out is not None:
            self._out.release_sent(self._runs - 2)  # as in router_metrics.py
            self._out.send(self._runs, torch.tensor(
                rows, dtype=torch.float64, device=torch.cuda.current_device()
            ))
        self._runs += 1
        self.stages = [StageFigures(*row) for row in rows]

    def end_drain(self) -> None:
        """Wait until what was sent has arrived."""
        if self._out is not None:
            self._out.finish()

    def _own(self) -> StageFigures:
        engine, window = self._engine, self._window
        drifts = engine.drift_counts - self._drifts
        self._drifts = Counter(engine.drift_counts)
        newest = window.ledger.newest
        return StageFigures(
            updates=engine.version,
            drift_max=max(drifts, default=0),
            drift_mean=sum(drift * n for drift, n in drifts.items()) / max(drifts.total(), 1),
            queue_depth=engine.in_flight_max,
            idle_fraction=self.idle.fraction,
            clip_coefficient=window.clip_coefficient,
            norm_lag=0 if newest is None else engine.version - 1 - newest.window,
            skipped=window.skipped,
            partial=window.partial,
        )
