"""The tied word embedding: owned by the first stage, a copy on the last one.

Megatron sums the two gradients over both stages at every step and lets both update their copy. Here
the first stage alone updates. The last stage sends it the gradient of each window; the updated
weight comes back and is put in place at a fixed forward: the one that carries the downstream report
of that window (``StageSchedule.reported_window``). Both messages are under way long before they are
needed, so neither stage waits. At microbatch ``j`` of the stream the copy has version
``max(0, j + 1 - num_stages) // accumulation``: it is behind the last stage's own version by what
the first stage's drift is, at most ``ceil((num_stages - 1) / accumulation)``. After a drain both
are equal.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_paci.channel import Link
from megatron_paci.groups import StageGroups
from megatron_paci.stage_local import optimizer_parts


class TiedEmbedding:
    """One end of the tied weight.

    Attributes:
        accumulation: Microbatches per window; changed between drains alone.
    """

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        groups: StageGroups,
        config: Any,
        *,
        num_stages: int,
        is_owner: bool,
    ):
        """Set up the links; nothing is posted yet.

        Args:
            parameter: The weight on this stage, shape (vocabulary, hidden), with Megatron's
                ``main_grad``.
            groups: Communicators, created with ``tied=True``.
            config: Megatron's model configuration; copied.
            num_stages: Pipeline size.
            is_owner: True on the first stage, False on the last.
        """
        self._parameter = parameter
        self._is_owner = is_owner
        self._num_stages = num_stages
        self.accumulation = 1
        self._gradients = Link(groups.tied_gradient, config, dtype=parameter.main_grad.dtype)
        self._weights = Link(groups.tied_weight, config, dtype=parameter.dtype)
        self._steps = 0
        self._weights_taken = 0

    def drop_state(self, optimizer: Any) -> None:
        """Free the copy's optimizer state, which a checkpoint may have brought.

        It would stay behind the other parameters' and Megatron saves one step count for all.
        """
        for part in optimizer_parts(optimizer):
            if part.optimizer is not None:
                part.optimizer.state.pop(_updated(self._parameter), None)

    def expect_gradient(self) -> None:
        """Before a window's last backward: let the other stage's gradient come in meanwhile."""
        if self._is_owner:
            self._gradients.post_receive(tuple(self._parameter.shape))

    @torch.no_grad()
    def join_gradients(self) -> None:
        """Send this window's gradient to the owner, or add the one that was sent."""
        if self._is_owner:
            self._parameter.main_grad.add_(self._gradients.take())
            # The last stage had taken this weight before it sent that gradient.
            taken = self._steps - -(-self._num_stages // self.accumulation)
            self._weights.release_sent(taken)
        else:
            # A copy: the buffer is zeroed for the next window before the owner needs this one.
            self._gradients.send(self._steps, self._parameter.main_grad.clone())

    def leave_to_owner(self) -> None:
        """Take the copy's gradient out of this stage's update."""
        if not self._is_owner:
            _updated(self._parameter).grad = None

    def stepped(self) -> None:
        """After the update: send the weight to the copy, or get ready to receive it."""
        if self._is_owner:
            # A copy: the next update may come before this message was taken.
            self._weights.send(self._steps, self._parameter.detach().clone())
        elif not self._weights.has_posted:
            self._weights.post_receive(tuple(self._parameter.shape))
        self._steps += 1

    @torch.no_grad()
    def take_weight(self) -> None:
        """On the last stage: put the next version of the owner's weight in place."""
        if self._is_owner:
            return
        weight = self._weights.take()
        main = _updated(self._parameter)
        with torch.autograd._unsafe_preserve_version_counter((self._parameter, main)):
            self._parameter.copy_(weight)
            if main is not self._parameter:  # mixed precision copies this one over the other
                main.copy_(weight)
        self._gradients.release_sent(self._weights_taken)
        self._weights_taken += 1
        if self._weights_taken < self._steps:
            self._weights.post_receive(tuple(self._parameter.shape))

    def settle(self) -> None:
        """At the end of a drain: bring the copy up to date and let all messages arrive."""
        while not self._is_owner and self._weights_taken < self._steps:
            self.take_weight()
        self._gradients.finish()
        self._weights.finish()


def tied_parameter(model: torch.nn.Module) -> torch.nn.Parameter | None:
    """Return the weight that this stage shares with another one, or None."""
    language_model = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    if not getattr(language_model, "share_embeddings_and_output_weights", False):
        return None
    if not (language_model.pre_process or language_model.post_process):
        return None
    return language_model.shared_embedding_or_output_weight()


def _updated(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the tensor the optimizer updates: the fp32 main copy in mixed precision."""
    main = getattr(parameter, "main_param", None)
    return parameter if main is None else main
