"""What the routers of a mixture of experts report for the log: auxiliary losses per layer.

Megatron sums them over all stages after every iteration. Here each stage adds its own to those of
the earlier stages and passes them on, at the end of each run of forwards; the last stage, which
logs, then has all of them. Routers record in forward passes, so what it logs is exactly its
iteration's; with recomputation they record in the recomputed forward, that is at the backward, and
what was in flight, or recomputed in a drain, counts in the next iteration.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker, get_moe_metrics_tracker

from megatron_paci.groups import StageGroups
from megatron_paci.link import Link

METRICS = (
    "load_balancing_loss",
    "seq_load_balancing_loss",
    "global_load_balancing_loss",
    "z_loss",
)


class RouterMetrics:
    """Adds up the metrics of an iteration along the pipeline."""

    def __init__(self, groups: StageGroups, config: Any):
        """Set up the links; nothing is posted yet.

        Args:
            groups: Communicators, created with ``metrics=True``.
            config: Megatron's model configuration.
        """

        def link(group: torch.distributed.ProcessGroup | None) -> Link | None:
            return None if group is None else Link(group, config, dtype=torch.float32)

        self._in = link(groups.metrics_from_previous)
        self._out = link(groups.metrics_to_next)
        self._num_layers = config.num_layers + (config.mtp_num_layers or 0)
        self._runs = 0
        self._drained: torch.Tensor | None = None

    @property
    def _entries(self) -> list[torch.Tensor]:
        """The tracker's values, (layers), one tensor per metric."""
        tracker: MoEMetricsTracker = get_moe_metrics_tracker()
        for name in METRICS:  # a stage without such layers has not recorded any
            tracker.ensure_initialized(name, self._num_layers)
        return [tracker.metrics[name].values for name in METRICS]

    @torch.no_grad()
    def end_run(self) -> None:
        """Add what the earlier stages have recorded in this run and pass the sum on."""
        entries = self._entries
        if self._drained is not None:
            for entry, recorded in zip(entries, self._drained):
                entry.add_(recorded)
            self._drained = None
        if self._in is not None:
            # Not posted earlier: it would hold up whoever waits for the device during the run.
            self._in.post_receive((len(METRICS), self._num_layers))
            for entry, earlier in zip(entries, self._in.take()):
                entry.add_(earlier)
        if self._out is not None:
            # Two runs ago, or more microbatches in flight than a run has: it has been taken.
            self._out.release_sent(self._runs - 2)
            self._out.send(self._runs, torch.stack(entries))
            get_moe_metrics_tracker().clear()  # passed on; what comes now is the next run's
        self._runs += 1

    def end_drain(self) -> None:
        """Keep what the drain has recorded, which Megatron forgets after an evaluation.

        The last stage never lags and has recorded nothing in it.
        """
        if self._out is not None:
            self._out.finish()
            self._drained = torch.stack(self._entries)
            get_moe_metrics_tracker().clear()
