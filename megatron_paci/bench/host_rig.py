"""One stage of a pipeline alone in a process: Megatron's 1F1B and PACI run around nothing.

The schedule functions, the engine, the channel and its links are the real ones, built as for
training. What they call is replaced by something that returns at once, the same for both:

- passes (``forward_step``, ``backward_step`` of Megatron's schedules) return tensors of one number;
- messages: ``P2PCommunicator._communicate`` hands out a tensor that is there already. With
  ``posting`` it is the real one, over a PyTorch backend that moves nothing: what it costs the host
  to post messages is counted then;
- an update of the weights, which Megatron makes outside of its schedule function. The reports that
  PACI sends for each are made, sent and received.

So what takes time is the loops themselves.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_paci.build import MegatronStage, install_stage
from megatron_paci.forward_backward import forward_backward_pipelining_paci
from megatron_paci.instrument import Instrument
from megatron_paci.report import REPORT_LENGTH, Report
from megatron_paci.telemetry import IdleTime
from megatron_paci.timeline import HostClock, Timeline

SHAPE = (1, 1, 1)


class Model:
    """What a schedule asks of a model chunk besides passes."""

    pre_process = post_process = True
    ddp_config = None
    buffers = expert_parallel_buffers = ()

    def __init__(self, config: TransformerConfig):
        self.config = config

    def parameters(self) -> tuple[()]:
        """Return nothing: there are no weights."""
        return ()

    def zero_grad_buffer(self) -> None:
        """Do nothing."""


class Optimizer:
    """What a stage asks of an optimizer besides updates."""

    def __init__(self, group: torch.distributed.ProcessGroup):
        self._group = group

    def get_grad_stats_parallel_group(self) -> torch.distributed.ProcessGroup:
        """Return the ranks over which gradient norms are summed."""
        return self._group

    def zero_grad(self) -> None:
        """Do nothing."""

    def step(self) -> None:
        """Do nothing."""


class HostRig:
    """A stage that can run iterations under either schedule; close it at the end.

    All of it is on the CPU. No process group may exist in this process before.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        microbatches: int,
        accumulation: int,
        *,
        posting: bool = False,
        observed: bool = False,
    ):
        """Build the stage and put the replacements in place.

        Args:
            stage: Which one of ``num_stages``.
            microbatches: Per iteration.
            accumulation: Microbatches per optimizer step of PACI.
            posting: Whether messages are posted with PyTorch.
            observed: Whether the stage is observed as for telemetry (instrument.py).
        """
        self._originals: list[tuple[Any, str, Any]] = []
        self._replace(torch.cuda, "current_device", lambda: torch.device("cpu"))
        self._replace(torch.cuda, "Stream", object)
        self._replace(torch.cuda, "stream", contextlib.nullcontext)
        self._replace(torch, "zeros", zeros)
        torch.distributed.init_process_group(
            "fake", store=FakeStore(), rank=stage, world_size=num_stages
        )
        pipeline = torch.distributed.new_group(range(num_stages))
        alone = torch.distributed.new_group([stage])
        self._groups = ProcessGroupCollection(
            pp=pipeline, tp=alone, cp=alone, dp=alone, dp_cp=alone
        )
        config = TransformerConfig(
            num_layers=num_stages, hidden_size=SHAPE[-1], num_attention_heads=1,
            pipeline_model_parallel_size=num_stages, pipeline_dtype=torch.float32,
            deallocate_pipeline_outputs=True, no_sync_func=contextlib.nullcontext,
            batch_p2p_sync=False,  # Megatron would wait for the device after every message
        )
        model = Model(config)
        self._communicator = P2PCommunicator(pipeline, config)
        optimizer = Optimizer(pipeline)
        self._stage = MegatronStage(
            model, optimizer, None, accumulation=accumulation, pg_collection=self._groups
        )
        self._leave_out_updates()
        self._arguments = {
            "forward_step_func": None,
            "data_iterator": None,
            "model": model,
            "num_microbatches": microbatches,
            "seq_length": SHAPE[0],
            "micro_batch_size": SHAPE[1],
        }
        self._replace(schedules, "forward_step", forward_step)
        self._replace(schedules, "backward_step", backward_step)
        if posting:  # nothing is written to what is received
            self._replace(Report, "from_vector", report_of_nothing)
        else:
            self._replace(P2PCommunicator, "_communicate", communicate)
        self._instrument = None
        if observed:
            self._instrument = Instrument(Timeline(HostClock()), optimizer, self._stage)
            self._idle = IdleTime()
        install_stage(self._stage)

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._originals.append((owner, name, vars(owner)[name]))
        setattr(owner, name, new)

    def _leave_out_updates(self) -> None:
        window, report = self._stage.window, Report(window=0, sum_of_squares=0.0)

        def step() -> None:
            window._open = False

        window.close = lambda number, later: report
        window.step = step
        window.hear = lambda earlier: None
        window.tell = lambda number: report
        window.settle = lambda: None

    def megatron(self) -> None:
        """Run an iteration of Megatron's 1F1B."""
        schedules.forward_backward_pipelining_without_interleaving(
            **self._arguments, p2p_communicator=self._communicator, pg_collection=self._groups
        )

    def paci(self) -> None:
        """Run an iteration of the PACI stream."""
        forward_backward_pipelining_paci(**self._arguments)
        if self._instrument is not None:
            self._instrument.end_iteration()
            self._idle.add(self._instrument.timeline.take())

    def close(self) -> None:
        """Put everything back."""
        self._stage.drain()
        if self._instrument is not None:
            self._instrument.close()
        install_stage(None)
        self._stage.close()
        torch.distributed.destroy_process_group()
        for owner, name, original in self._originals:
            setattr(owner, name, original)


_zeros, _from_vector = torch.zeros, Report.from_vector


def zeros(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """Stand in for ``torch.zeros``: Megatron's schedule wants a number on the GPU."""
    return _zeros(*args, **kwargs)


def report_of_nothing(values: list[float]) -> Report:
    """Stand in for ``Report.from_vector``: whatever the numbers are, take zeros."""
    return _from_vector([0.0] * len(values))


GRADIENT = torch.zeros(SHAPE)
NUM_TOKENS = torch.zeros([], dtype=torch.int)
# By shape: messages of the pipeline, and reports.
RECEIVED = {shape: torch.zeros(shape) for shape in (SHAPE, (REPORT_LENGTH,))}


def forward_step(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output and a number of tokens; a new output, since schedules free its memory."""
    return torch.empty(SHAPE), NUM_TOKENS


def backward_step(input_tensor: Any, *args: Any) -> torch.Tensor | None:
    """Return the gradient of the input."""
    return None if input_tensor is None else GRADIENT


DONE = SimpleNamespace(wait=lambda: True, is_completed=lambda: True)
REQUESTS = dict.fromkeys(("send_next", "send_prev", "recv_next", "recv_prev"), DONE)


def communicate(
    communicator: P2PCommunicator, *, tensor_send_next: Any, tensor_send_prev: Any,
    recv_prev: bool, recv_next: bool, tensor_shape: Any, wait_on_reqs: bool = True,
) -> tuple[Any, Any, dict[str, Any]]:
    """Stand in for ``P2PCommunicator._communicate``: every message has arrived."""
    if recv_prev:
        return RECEIVED[tensor_shape], None, REQUESTS
    if recv_next:
        return None, RECEIVED[tensor_shape], REQUESTS
    return None, None, REQUESTS
