"""The passes of a Megatron stage, by the functions of Megatron's own schedules."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules


class MegatronCompute:
    """Runs passes of one model chunk; implements ``protocols.Compute``.

    The forward-step function and the data iterator come with every call of Megatron's training
    loop and are bound anew then.

    Attributes:
        forward_data: What the loss function returned for logging, one entry per microbatch
            forwarded since the last ``bind``; stays empty on stages without the loss.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: Any,
        *,
        depth: int,
        context_parallel_size: int,
        is_last_stage: bool,
    ):
        self._model = model
        self._config = config
        self._spared = config.num_microbatches_with_partial_activation_checkpoints
        self._depth = depth
        self._context_parallel_size = context_parallel_size
        self._is_last_stage = is_last_stage
        self._forward_step_func: Callable | None = None
        self._data_iterator: Any = None
        self._accumulation = 1
        self._num_tokens: deque[Any] = deque()
        self._freed: torch.Tensor | None = None
        self.forward_data: list[Any] = []

    def bind(self, forward_step_func: Callable, data_iterator: Any, accumulation: int) -> None:
        """Set what the next forwards use; the loss is scaled by 1 / ``accumulation``."""
        self._forward_step_func = forward_step_func
        self._data_iterator = data_iterator
        self._accumulation = accumulation
        self.forward_data = []

    def forward(
        self, microbatch: int, input_tensor: torch.Tensor | None, first_of_version: bool
    ) -> torch.Tensor:
        """Return the output, (sequence, microbatch size, hidden), or the loss on the last stage."""
        output_tensor, num_tokens = schedules.forward_step(
            self._forward_step_func,
            self._data_iterator,
            self._model,
            self._accumulation,
            input_tensor,
            self.forward_data,
            self._config,
            cp_group_size=self._context_parallel_size,
            # Whether this microbatch recomputes all layers; None if the model decides by itself.
            checkpoint_activations_microbatch=(
                None if self._spared is None else microbatch % self._depth >= self._spared
            ),
            is_first_microbatch=first_of_version,
            current_microbatch=microbatch,
            is_last_stage=self._is_last_stage,
        )
        if self._config.calculate_per_token_loss and self._is_last_stage:
            self._num_tokens.append(num_tokens)
        return output_tensor

    def take_num_tokens(self, num_microbatches: int) -> int:
        """Return the tokens in the loss of the oldest microbatches not asked for (per-token loss).

        On the last stage only; a later microbatch may have been forwarded already.
        """
        num_tokens = sum(islice(self._num_tokens, num_microbatches))
        for _ in range(num_microbatches):
            self._num_tokens.popleft()
        return int(num_tokens)

    def backward(
        self,
        input_tensor: torch.Tensor | None,
        output_tensor: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Add to the weight gradients and return the gradient of the input, None without input."""
        return schedules.backward_step(input_tensor, output_tensor, output_grad, self._config)

    def release(self, output_tensor: torch.Tensor) -> None:
        """Free the data of an output; the channel holds what is still being sent.

        Does what Megatron's ``deallocate_output_tensor`` does, but without a new tensor for every
        output: one element without meaning stands for all of them.
        """
        if self._config.deallocate_pipeline_outputs:
            if self._freed is None or self._freed.dtype != output_tensor.dtype:
                self._freed = torch.empty(1, dtype=output_tensor.dtype, device=output_tensor.device)
            output_tensor.data = self._freed
