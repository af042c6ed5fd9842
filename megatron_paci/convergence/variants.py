"""What experiments change and the product does not have: weight stashing, optimizers, rates."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from megatron_paci.compute import MegatronCompute
from megatron_paci.optimizers import optimizer_parts


class StashingCompute(MegatronCompute):
    """Gives every backward the weights of its forward, as PipeDream does; order as ever.

    Eq. 1 of the PACI paper, which ``MegatronCompute`` follows, takes the weights as they are.
    """

    def __init__(self, model: torch.nn.Module, *args: Any, **kwargs: Any):
        """As ``MegatronCompute``; a copy of the weights is kept per version in flight."""
        super().__init__(model, *args, **kwargs)
        self._parameters = tuple(model.parameters())
        self._stashes: deque[list[torch.Tensor]] = deque()
        self._newest: list[torch.Tensor] | None = None

    @torch.no_grad()
    def _copies(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def _set(self, values: list[torch.Tensor]) -> None:
        # Saved tensors are these parameters themselves: in place, and unseen by autograd.
        with torch.autograd._unsafe_preserve_version_counter(self._parameters):
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)

    def forward(self, microbatch: int, input_tensor: Any, first_of_version: bool) -> Any:
        """Return the output; note the weights it was made with.

        A tied weight is renewed at fixed forwards and not by this stage's steps, so the copy is
        compared and not the version.
        """
        newest = self._newest
        if newest is None or not all(map(torch.equal, newest, self._parameters)):
            self._newest = newest = self._copies()
        self._stashes.append(newest)
        return super().forward(microbatch, input_tensor, first_of_version)

    def backward(self, input_tensor: Any, output_tensor: Any, output_grad: Any) -> Any:
        """Return the gradient of the input, at the weights of the forward."""
        stash = self._stashes.popleft()
        if all(map(torch.equal, stash, self._parameters)):
            return super().backward(input_tensor, output_tensor, output_grad)
        now = self._copies()
        self._set(stash)
        gradient = super().backward(input_tensor, output_tensor, output_grad)
        self._set(now)
        return gradient


class StageRates:
    """A learning-rate schedule whose rates are multiplied by a factor of this stage's own.

    PipeMare's rule T1 (arXiv 1910.05124): the rate is divided by ``delay ** p``, where ``p`` falls
    from 1 to 0 over the first samples.

    Attributes:
        inner: Megatron's schedule.
    """

    def __init__(self, scheduler: Any, optimizer: Any, *, delay: float, samples: int):
        """Wrap Megatron's scheduler.

        Args:
            delay: Updates between a forward and its backward on this stage; 1 or less changes
                nothing.
            samples: Over how many samples the rule fades.
        """
        self.inner = scheduler
        self._optimizer = optimizer
        self._delay = max(1.0, delay)
        self._samples = samples
        self.step(0)

    def step(self, increment: int) -> None:
        """Advance by ``increment`` samples."""
        self.inner.step(increment=increment)
        power = max(0.0, 1.0 - self.inner.num_steps / self._samples)
        for group in self._optimizer.param_groups:
            group["lr"] /= self._delay**power

    def state_dict(self) -> dict[str, Any]:
        """Return the state of Megatron's scheduler."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of Megatron's scheduler."""
        self.inner.load_state_dict(state)
        self.step(0)


def use_nadam(optimizer: Any) -> None:
    """Make a Megatron optimizer with AdamW inside update by NAdam (Nesterov momentum) instead.

    Rates, betas, epsilon and weight decay (decoupled) stay; the momentum is the same at every step,
    without the schedule of the NAdam paper, which begins with half of it. To be called before the
    first step.
    """
    for part in optimizer_parts(optimizer):
        if part.is_stub_optimizer:
            continue
        shared = {"lr", "betas", "eps", "weight_decay"}
        groups = [
            {name: value for name, value in group.items()
             if name in shared or name not in part.optimizer.defaults}
            for group in part.optimizer.param_groups
        ]
        part.optimizer = torch.optim.NAdam(
            groups, decoupled_weight_decay=True, momentum_decay=0.0
        )
