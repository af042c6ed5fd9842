"""What a Megatron optimizer consists of, and what it updates for a parameter of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def optimizer_parts(optimizer: Any) -> list[Any]:
    """Return the optimizers that a chained one consists of, or the one itself."""
    return getattr(optimizer, "chained_optimizers", None) or [optimizer]


def take_back_steps(optimizer: Any, count: int) -> None:
    """Lower the number of steps that an optimizer counts for its bias corrections by ``count``."""
    for part in optimizer_parts(optimizer):
        if part.is_stub_optimizer:
            continue
        for counted in (*part.optimizer.param_groups, *part.optimizer.state.values()):
            if "step" in counted:
                counted["step"] = counted["step"] - count


@dataclass(frozen=True)
class Updated:
    """What an optimizer updates for a parameter on this rank.

    The parameter itself in fp32, its fp32 main copy in mixed precision; only a flat part of either
    with the distributed optimizer.
    """

    tensor: torch.Tensor
    part: Any
    """The optimizer that holds it."""
    elements: slice | None = None
    """Which elements of the flattened parameter it is; None for all, in the parameter's shape."""

    def set(self, weight: torch.Tensor) -> None:
        """Take the values of ``weight``, which has the shape of the parameter."""
        source = weight if self.elements is None else weight.view(-1)[self.elements]
        self.tensor.copy_(source)

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state for it, empty if there is none."""
        return self.part.optimizer.state.get(self.tensor, {})

    def set_state(self, values: dict[str, Any]) -> None:
        """Make ``values`` the optimizer's state for it."""
        self.part.optimizer.state[self.tensor] = values

    def drop_state(self) -> None:
        """Free the optimizer's state for it."""
        self.part.optimizer.state.pop(self.tensor, None)


def updated_by(optimizer: Any, parameter: torch.nn.Parameter) -> Updated | None:
    """Return what ``optimizer`` updates for ``parameter`` here, None if other replicas do."""
    for part in optimizer_parts(optimizer):
        if part.is_stub_optimizer:
            continue
        if isinstance(part, DistributedOptimizer):
            if parameter in part.model_param_group_index_map:
                group, index = part.model_param_group_index_map[parameter]
                held = part._get_model_param_range_map(parameter)["param"]
                tensor = part.optimizer.param_groups[group]["params"][index]
                return Updated(tensor, part, slice(held.start, held.end))
            continue
        main = getattr(parameter, "main_param", None)
        tensor = parameter if main is None else main
        if any(tensor is each for each in part.get_parameters()):
            return Updated(tensor, part)
    return None
