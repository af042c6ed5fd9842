"""Send what is asked of a GPU to the CPU: factory calls, ``.to()``, ``.type()``, process groups.

A ``TorchFunctionMode`` could do the device names in one place, but it is called for every
operation, and it belongs to one thread. Wrappers of the functions that take a device are cheaper.
Measured on a step of a tiny GPT (4 layers, hidden 64, 8 microbatches, one process, one thread): the
mode makes 50 ms about 75; the wrappers are called 230 times, at 0.2 to 0.6 us each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def to_cpu(device: Any) -> Any:
    """A device argument with everything that means a GPU turned into cpu."""
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    return "cpu" if isinstance(device, int) else device


def factory(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function with keywords ``device`` and perhaps ``pin_memory``."""

    @functools.wraps(original)
    def on_the_cpu(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if kwargs.get("device") is not None:
                kwargs["device"] = to_cpu(kwargs["device"])
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return on_the_cpu


def mover(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.to``, whose first argument may be a device, a dtype or a tensor."""

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], (str, int, torch.device)):
            args = (to_cpu(args[0]), *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = to_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def takes_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method whose only argument is a device."""

    @functools.wraps(original)
    def with_cpu(self: Any, device: Any = None) -> Any:
        return original(self, to_cpu(device))

    return with_cpu


def tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type``: Megatron compares its answer with "torch.cuda.FloatTensor"."""

    @functools.wraps(original)
    def type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = original(self)
            # Under a TorchFunctionMode the original dispatches to this wrapper once more.
            if self.device.type == "cpu" and not name.startswith("torch.cuda."):
                name = name.replace("torch.", "torch.cuda.", 1)
            return name
        if not isinstance(dtype, torch.dtype):
            name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
            dtype = name.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return type


def loader(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch.load``: a file written on a GPU is read into host memory."""

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        map_location = "cpu" if map_location is None else to_cpu(map_location)
        return original(f, map_location, *args, **kwargs)

    return load


def without_device_id(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a maker of process groups: gloo has no device to bind to."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return original(*args, **kwargs)

    return make


def on_one_gloo_loop(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the maker of gloo groups: all share one transport, and with it one polling thread.

    Each group has its own otherwise, which wakes a hundred times a second; a Megatron job has
    dozens of groups per rank, and a process that runs one job after another has ever more.
    """
    device = None

    @functools.wraps(original)
    def make(options: Any, backend_options: Any) -> Any:
        nonlocal device
        device = device or torch.distributed.ProcessGroupGloo.create_default_device()
        own = torch.distributed.ProcessGroupGloo._Options()
        own._devices, own._timeout = [device], options.timeout
        own.enable_reconfigure = options.enable_reconfigure
        group = torch.distributed.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, own
        )
        group.options.global_ranks_in_group = options.global_ranks_in_group
        group.options.group_name = options.group_id
        return group

    return make


def list_splits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``all_to_all_single``, whose split sizes have to be lists.

    Megatron's expert dispatcher brings them to the host just before, but only if they are on a GPU;
    on the CPU they arrive as tensors.
    """

    @functools.wraps(original)
    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        args = args[:2] + tuple(a.tolist() if torch.is_tensor(a) else a for a in args[2:])
        for name in ("output_split_sizes", "input_split_sizes"):
            if torch.is_tensor(kwargs.get(name)):
                kwargs[name] = kwargs[name].tolist()
        return original(*args, **kwargs)

    return all_to_all_single


def keeps_random_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a host-side consumer of random numbers, which on a GPU has a generator of its own."""

    @functools.wraps(original)
    def aside(*args: Any, **kwargs: Any) -> Any:
        state = torch.default_generator.get_state()
        try:
            return original(*args, **kwargs)
        finally:
            torch.default_generator.set_state(state)

    return aside
