"""One stage of a pipeline, alone in this process, for the log of what it does.

The stage is the real one: engine, channel, links, Megatron's communicators, window, tied embedding,
router metrics. Its model and optimizer are stand-ins, its passes are marks, and nothing is sent:
what it receives is made up here, which changes nothing of what it does.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed import fake_pg

from megatron_paci.build import MegatronStage, install_stage
from megatron_paci.forward_backward import forward_backward_pipelining_paci
from megatron_paci.report import REPORT_LENGTH, Report
from tests.nccl_order.recorder import Recorder
from tests.nccl_order.rules import Event

ITERATION = "iteration"


class Model(torch.nn.Module):
    """A stand-in for a wrapped model; its only weight is the tied embedding, where there is one."""

    def __init__(self, config: TransformerConfig, stage: int, num_stages: int, tied: bool):
        super().__init__()
        self.config = config
        self.pre_process, self.post_process = stage == 0, stage == num_stages - 1
        self.share_embeddings_and_output_weights = tied
        self.weight = torch.nn.Parameter(torch.ones(5, 1))
        self.buffers, self.expert_parallel_buffers = [], []
        self.weight.main_grad = torch.zeros(5, 1)
        self.weight.shared_embedding = tied and (self.pre_process or self.post_process)

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter:
        return self.weight

    def set_input_tensor(self, input_tensor) -> None:
        pass

    def zero_grad_buffer(self) -> None:
        pass

    def scale_gradients(self, factor) -> None:
        pass


class Optimizer:
    """A stand-in; the norm of its gradient is on the device, as Megatron's."""

    is_stub_optimizer = False
    config = SimpleNamespace(clip_grad=0.0, log_num_zeros_in_grad=False)

    def __init__(self, model: Model, alone):
        self.grad_stats_parallel_group = alone
        self._weight = model.weight
        self.optimizer = SimpleNamespace(state={model.weight: {"moment": torch.zeros(5, 1)}})

    def get_grad_stats_parallel_group(self):
        return self.grad_stats_parallel_group

    def get_parameters(self):
        return [self._weight]

    def prepare_grads(self) -> bool:
        return False

    def get_grad_norm(self) -> torch.Tensor:
        return torch.ones(())

    def zero_grad(self) -> None:
        pass

    def step_with_ready_grads(self) -> None:
        pass


class LoneStage:
    """One stage, to be used within ``alone``.

    Attributes:
        recorder: Has the log.
    """

    def __init__(self, recorder: Recorder, stage: int, num_stages: int, *, variable: bool = False,
                 tied: bool = False, routers: bool = False, extra_in_flight: int = 0,
                 defer_step: bool = False):
        """Build the stage.

        Args:
            recorder: Is recording; begins a new log.
            variable: Whether microbatches differ in length.
            tied: Whether the first and the last stage share a weight.
            routers: Whether router metrics are passed on.
            extra_in_flight: As in ``StageSchedule``.
            defer_step: Likewise.
        """
        self._is_last = stage == num_stages - 1
        self._variable = variable
        self._received: Counter[tuple] = Counter()
        self._engine = None
        self.recorder = recorder
        recorder.run = self._answer
        recorder.restart([])
        self._config = TransformerConfig(
            num_layers=num_stages, hidden_size=1, num_attention_heads=1, add_bias_linear=False,
            pipeline_model_parallel_size=num_stages, pipeline_dtype=torch.float32,
            variable_seq_lengths=variable, num_moe_experts=2 if routers else None,
            moe_token_dispatcher_type="alltoall",
            calculate_per_token_loss=True,
        )
        self._config.finalize_model_grads_func = lambda *args, **kwargs: None
        self._model = Model(self._config, stage, num_stages, tied)
        own = torch.distributed.new_group([stage], use_local_synchronization=True)
        pipeline = torch.distributed.new_group(range(num_stages), group_desc="PIPELINE")
        self._groups = ProcessGroupCollection(
            pp=pipeline, tp=own, cp=own, dp=own, dp_cp=own, embd=None, pos_embd=None
        )
        self.stage = MegatronStage(
            self._model, Optimizer(self._model, own), None,
            accumulation=1, extra_in_flight=extra_in_flight, defer_step=defer_step,
            pg_collection=self._groups,
        )
        self._engine = self.stage.engine
        self._engine.compute = self
        self.stage.window._take_num_tokens = self.take_num_tokens

    def train(self, num_microbatches: int) -> None:
        """Run an iteration; then the host waits for its stream: a timer, or a loss to be logged.

        The mark ``ITERATION`` says where it ends.
        """
        self.stage.run(
            None, None, num_microbatches, seq_length=self._length(0), micro_batch_size=1
        )
        self.recorder.host_waits()
        self.recorder.mark(ITERATION)

    def evaluate(self, num_microbatches: int, *, batched: bool) -> None:
        """Drain, then run Megatron's own forwards over the group of the pipeline."""
        self.stage.drain()
        config = copy.copy(self._config)
        config.batch_p2p_comm = batched
        install_stage(self.stage)
        try:
            forward_backward_pipelining_paci(
                forward_step_func=lambda data, model: (self.forward(0, None, False), self._loss),
                data_iterator=None, model=self._model, num_microbatches=num_microbatches,
                seq_length=self._length(0), micro_batch_size=1, forward_only=True,
                p2p_communicator=P2PCommunicator(self._groups.pp, config),
                pg_collection=self._groups,
            )
        finally:
            install_stage(None)
        self.recorder.host_waits(whole_device=True)

    def save(self) -> None:
        """Drain for a checkpoint."""
        with self.stage.checkpoint():
            self.recorder.host_waits(whole_device=True)

    # What the engine asks of its compute.

    def forward(self, microbatch, input_tensor, first_of_version):
        self.recorder.mark(f"F{microbatch}")
        return torch.empty((self._length(microbatch), 1, 1))

    def backward(self, input_tensor, output_tensor, output_grad):
        self.recorder.mark("B")
        return input_tensor

    def release(self, output_tensor) -> None:
        pass

    def take_num_tokens(self, num_microbatches: int) -> int:
        self.recorder.host_waits()
        return 1

    def _loss(self, output_tensor):
        return torch.zeros(()), torch.ones((), dtype=torch.int), {}

    def _length(self, microbatch: int) -> int:
        return 1 + microbatch % 3 if self._variable else 2

    def _answer(self, original, call, *args, **kwargs):
        """Stand in for torch.distributed: make up what is received."""
        name = original.__name__
        if name == "irecv":
            self._fill(call["tensor"], call["group"])
        elif name == "batch_isend_irecv":
            for op in call["p2p_op_list"]:
                if op.op.__name__ == "irecv":
                    self._fill(op.tensor, op.group)
            return [Done()]
        elif name == "all_gather_object":
            call["object_list"][:] = [call["obj"]] * len(call["object_list"])
            return None
        elif name == "broadcast_object_list":
            call["object_list"][0] = {"moment": ((5, 1), torch.float32)}
            return None
        return Done()

    @torch.no_grad()
    def _fill(self, tensor: torch.Tensor, group) -> None:
        if self._engine is None:
            return
        stream = self._engine._stream_version
        key = group, tensor.dtype, None if group.group_desc == "PACI_BACKWARD" else stream
        number = self._received[key]
        if tensor.shape == (REPORT_LENGTH,):
            window = number + (key[2] or 0)
            tensor.copy_(torch.tensor(Report(window, 1.0).vector(), dtype=torch.float64))
        elif tensor.shape == (3,):
            length = self._length(number if group.group_desc == "PACI_SHAPES" else 0)
            tensor.copy_(torch.tensor([length, 1, 1]))
        else:
            return
        self._received[key] += 1


class Done:
    """The handle of what is done."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return False


@contextmanager
def alone(
    recorder: Recorder, stage: int, num_stages: int, **options: int
) -> Iterator[LoneStage]:
    """Make this process a rank of a job without other ranks, for the time of a ``with``."""
    torch.distributed.init_process_group(
        "fake", rank=stage, world_size=num_stages, store=fake_pg.FakeStore()
    )
    try:
        yield LoneStage(recorder, stage, num_stages, **options)
    finally:
        destroy_moe_metrics_tracker()
        torch.distributed.destroy_process_group()




def logs_of_a_pipeline(
    num_stages: int,
    shapes: Iterable[tuple[int, int]],
    training: Callable[[LoneStage, int], None],
    **options: int,
) -> dict[tuple[int, int], list[list[Event]]]:
    """Return the logs of all stages by (m, a), each from the building of the stage on.

    Args:
        shapes: Microbatches of an iteration and accumulation.
        training: Called with a stage and m; what it does ends with a drain.
        options: As for ``LoneStage``.
    """
    logs: dict[tuple[int, int], list[list[Event]]] = {shape: [] for shape in shapes}
    with Recorder().recording() as recorder:
        for stage in range(num_stages):
            with alone(recorder, stage, num_stages, **options) as lone:
                built = recorder.log
                for microbatches, accumulation in logs:
                    recorder.restart(built)
                    lone.stage.set_accumulation(accumulation)
                    training(lone, microbatches)
                    lone.stage.drain()
                    logs[microbatches, accumulation].append(recorder.log)
    return logs
