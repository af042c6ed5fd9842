"""Checkpoints of ``--use-distributed-optimizer`` with torch's Adam.

With Transformer Engine or Apex an optimizer counts its steps in the parameter groups; torch's Adam
counts them in the state of every parameter, in a tensor that it adds to in place. Megatron's
distributed optimizer saves such a state, but cannot load it:

- it reads the count from the state, and before loading there is none;
- it gives all parameters the same tensor for their count, which every one of them then adds to;
- it copies the count along with the tensors of a parameter, though no format stores it there;
- in fp32 it copies into a view of the model's parameter, which autograd refuses.

Here the state is there before it is read, every parameter has a count of its own, and only what a
checkpoint stores is copied. While training runs nothing of this is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def with_initial_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DistributedOptimizer.state_dict``: before the first step let Adam's state be there.

    It is what Adam itself begins with, a count of zero and moments of zero.
    """

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        adam = self.optimizer
        if isinstance(adam, torch.optim.Adam) and not adam.state:
            for group in adam.param_groups:
                for parameter in group["params"]:
                    adam.state[parameter] = {"step": torch.zeros(())} | {
                        key: torch.zeros_like(parameter) for key in self.optimizer_state_keys
                    }
        return original(self)

    return state_dict


def with_own_counts(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``DistributedOptimizer.load_state_dict``: give every parameter a count of its own."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    return load_state_dict


def without_counts(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``DistributedOptimizer._set_main_param_and_optimizer_states``: leave the count alone.

    ``load_state_dict`` has set it already.
    """

    @functools.wraps(original)
    @torch.no_grad()
    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        own = self._get_main_param_and_optimizer_states(model_param)
        kept = {"step": own["step"]} if "step" in own else {}
        original(self, model_param, tensors | kept)

    return set_states
