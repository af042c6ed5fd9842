"""The shared word embedding: owned by the first stage, a copy on the last one.

The last stage has one if it ties its output weights to the embedding, or for multi-token
prediction, whose layers embed tokens again.

Megatron sums the two gradients over both stages at every step and lets both update their copy. Here
the first stage alone updates. The last stage sends it the gradient of each window; the updated
weight comes back and is put in place at a fixed forward: the one that carries the downstream report
of that window (``StageSchedule.reported_window``). Both messages are under way long before they are
needed, so neither stage waits. At a forward of the last stage the copy has the version that the
first stage had at the same one (``StageSchedule.version_at_forward``). With ``d`` for the depth of
the first stage that is at most ``ceil((d - 1) / accumulation)`` behind the last stage's own
version. After a drain both are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_paci.groups import StageGroups
from megatron_paci.link import Link
from megatron_paci.optimizers import updated_by
from megatron_paci.schedule import StageSchedule


class TiedEmbedding:
    """One end of the tied weight."""

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        optimizer: Any,
        groups: StageGroups,
        config: Any,
        *,
        is_owner: bool,
        make_link: Callable[..., Any] = Link,
    ):
        """Set up the links; nothing is posted yet.

        Args:
            parameter: The weight on this stage, shape (vocabulary, hidden), with Megatron's
                ``main_grad``.
            optimizer: The stage's Megatron optimizer.
            groups: Communicators, created with ``tied=True``.
            config: Megatron's model configuration; copied.
            is_owner: True on the first stage, False on the last.
            make_link: Called for each direction as ``Link`` is.
        """
        self._parameter = parameter
        self._updated = updated_by(optimizer, parameter)
        self._groups = groups
        self._is_owner = is_owner
        self._windows_taken_late = 0
        self._gradients = make_link(groups.tied_gradient, config, dtype=parameter.main_grad.dtype)
        self._weights = make_link(groups.tied_weight, config, dtype=parameter.dtype)
        self._steps = 0
        self._weights_sent = 0
        self._weights_taken = 0

    def begin_stream(self, schedule: StageSchedule) -> None:
        """Take the schedule of the stream that begins."""
        # The last stage sends the gradient of window w after the forward of (w + 1) a - 1, the last
        # one before a drain, and takes the weight of window v with that of (v + 1) a + d - 1, or of
        # the next one where steps are deferred.
        late = schedule.depth_of(0) + schedule.defer_step
        self._windows_taken_late = -(-late // schedule.accumulation)

    def expect_gradient(self) -> None:
        """Before a window's last backward: let the other stage's gradient come in meanwhile."""
        if self._is_owner and self._updated is not None:
            self._gradients.post_receive(tuple(self._gradient.shape))

    @torch.no_grad()
    def join_gradients(self) -> None:
        """Send this window's gradient to the owner, or add the one that was sent."""
        if self._is_owner:
            if self._updated is not None:  # else other replicas update all of it
                self._gradient.add_(self._gradients.take())
            # The last stage had taken this weight before it sent that gradient.
            self._weights.release_sent(self._steps - self._windows_taken_late)
        elif self._updated is not None:
            # A copy: the buffer is zeroed for the next window before the owner needs this one.
            self._gradients.send(self._steps, self._gradient.clone())

    @property
    def _gradient(self) -> torch.Tensor:
        """The part of the window's gradient that this replica uses.

        Megatron gives the weight a bucket of its own, cut alike on both stages, so replicas with
        the same number have the same part.
        """
        gradient, elements = self._parameter.main_grad, self._updated.elements
        return gradient if elements is None else gradient.view(-1)[elements]

    def leave_to_owner(self) -> None:
        """Take the copy's gradient out of this stage's update."""
        if not self._is_owner and self._updated is not None:
            self._updated.tensor.grad = None

    def stepped(self) -> None:
        """After the update: count it, and get ready to receive the weight of the owner."""
        self._steps += 1
        if not self._is_owner and not self._weights.has_posted:
            self._weights.post_receive(tuple(self._parameter.shape))

    def weight_is_whole(self) -> None:
        """Send the newest weight to the copy; called as soon as replicas have gathered it."""
        if self._is_owner and self._weights_sent < self._steps:
            # A copy: the next update may come before this message was taken.
            self._weights.send(self._weights_sent, self._parameter.detach().clone())
            self._weights_sent += 1
            assert self._weights_sent == self._steps, "a version of the tied weight was not sent"

    @torch.no_grad()
    def take_weight(self) -> None:
        """On the last stage: put the next version of the owner's weight in place."""
        if self._is_owner:
            return
        weight = self._weights.take()
        with torch.autograd._unsafe_preserve_version_counter((self._parameter,)):
            self._parameter.copy_(weight)
        if self._updated is not None and self._updated.tensor.dtype != weight.dtype:
            self._updated.set(weight)  # a main weight of its own; an update copies it back
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

    def drop_state(self) -> None:
        """Free the optimizer state of the copy, which a checkpoint may have brought."""
        if not self._is_owner and self._updated is not None:
            self._updated.drop_state()

    def lend_state(self) -> None:
        """Give the copy the optimizer state of its owner, for a checkpoint like Megatron's own.

        The main weight of mixed precision too: until now it was the rounded one.

        Both ends have to call it, after a drain.
        """
        if self._updated is None:
            return
        group = self._groups.tied_weight
        owner = torch.distributed.get_process_group_ranks(group)[0]
        torch.distributed.broadcast(self._updated.tensor.detach(), src=owner, group=group)
        state = self._updated.state if self._is_owner else {}
        # Counts as they are (an optimizer may keep them in tensors, on the host), tensors by shape.
        described = [{name: _described(value) for name, value in state.items()}]
        torch.distributed.broadcast_object_list(described, src=owner, group=group)
        lent = {}
        for name, value in described[0].items():
            if isinstance(value, tuple):
                shape, dtype = value
                value = state.get(name)
                if value is None:
                    value = torch.empty(shape, dtype=dtype, device=self._parameter.device)
                torch.distributed.broadcast(value, src=owner, group=group)
            lent[name] = value
        if not self._is_owner and lent:
            # Megatron stores one step count for all parameters of a stage, and after a partial
            # update the stages' counts differ.
            steps = [each["step"] for each in self._updated.part.optimizer.state.values()
                     if "step" in each]
            if steps and "step" in lent:
                lent["step"] = steps[0].clone()
            self._updated.set_state(lent)


def _described(value: Any) -> Any:
    """Return shape and type of a tensor, and what is no more than a number as it is."""
    if not torch.is_tensor(value):
        return value
    return (tuple(value.shape), value.dtype) if value.ndim else value.cpu()


def tied_parameter(model: torch.nn.Module) -> torch.nn.Parameter | None:
    """Return the weight that this stage shares with another one, or None.

    Raises:
        ValueError: A stage between the first and the last one holds a copy.
    """
    language_model = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    weight = getattr(language_model, "shared_embedding_or_output_weight", lambda: None)()
    if not getattr(weight, "shared_embedding", False):
        return None
    if not (language_model.pre_process or language_model.post_process):
        raise ValueError(
            "a stage between the first and the last one holds a copy of the word embedding; PACI "
            "keeps one on the last stage alone: place multi-token prediction there"
        )
    return weight


def has_unused_output_weight(model: torch.nn.Module) -> bool:
    """Whether this stage holds an output weight that no forward uses.

    Megatron allocates one where multi-token prediction brings the embedding to the last stage and
    the output is tied to it.
    """
    language_model = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    return (
        getattr(language_model, "mtp_process", False)
        and language_model.share_embeddings_and_output_weights
        and not language_model.pre_process
    )
