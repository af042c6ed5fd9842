"""Every name that the CPU device replaces, in one table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._device import _device_constructors

from megatron_paci.cpu import redirect as r
from megatron_paci.cpu import stand_ins as s
from megatron_paci.cpu.missing import (
    cpu_only_class,
    missing_class,
    missing_function,
    proxy_class,
)


class Row(NamedTuple):
    """Replace ``names`` (blank-separated) of the object at the dotted path ``target``.

    ``make`` is given the name's full path and its old object, and returns the new one.
    """

    target: str
    names: str
    make: Callable[[str, Any], Any]
    why: str


def table(current: s.CurrentDevice) -> list[Row]:
    """The rows of this torch build.

    Args:
        current: remembers what ``torch.cuda.set_device`` was given.
    """
    cuda, tensor = "torch.cuda", "torch.Tensor"
    return [
        # target, names, replacement, why
        Row(cuda, "is_available is_bf16_supported", answer(True), "Megatron insists on a GPU"),
        Row(cuda, "device_count", use(s.device_count), "ranks of a node each want a device"),
        Row(cuda, "current_device", use(current.get), "an index: the factories understand it"),
        Row(cuda, "set_device", use(current.set), "remembered, for the line above"),
        Row(cuda, "get_device_name", answer("cpu"), "printed"),
        Row(cuda, "get_device_capability", use(s.capability), "chooses kernels, gates options"),
        Row(cuda, "get_device_properties", use(s.properties), "the same"),
        Row(cuda, "device device_of StreamContext", no_context, "one device, one stream"),
        Row(cuda, "stream", use(s.Nothing), "the same"),
        Row(cuda, "Stream", lambda path, old: s.Stream, "work is done when its call returns"),
        Row(cuda, "Event", lambda path, old: s.Event, "host time"),
        Row(cuda, "current_stream default_stream", use(s.the_stream), "the one stream"),
        Row(cuda, "init synchronize set_stream _sleep", answer(None), "nothing to wait for"),
        Row(cuda, "is_current_stream_capturing", answer(False), "no graphs"),
        Row(cuda, "empty_cache ipc_collect", answer(None), "no caching allocator"),
        Row(
            cuda,
            "reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached "
            "reset_accumulated_memory_stats",
            answer(None),
            "the host keeps no such counters",
        ),
        Row(cuda, "memory_allocated memory_reserved", use(s.host_memory), "resident size"),
        Row(cuda, "device_memory_used", use(s.host_memory), "the same"),
        Row(cuda, "max_memory_allocated max_memory_reserved", use(s.host_memory_peak), "its peak"),
        Row(cuda, "memory_stats", use(s.memory_stats), "the same as a dictionary"),
        Row(cuda, "mem_get_info", use(s.memory_info), "free and total memory of the machine"),
        Row(cuda, "get_rng_state", use(s.get_rng_state), "the CPU's generator is the device's"),
        Row(cuda, "set_rng_state", use(s.set_rng_state), "the same"),
        Row(cuda, "get_rng_state_all", use(s.get_rng_state_all), "the same"),
        Row(cuda, "set_rng_state_all", use(s.set_rng_state_all), "the same"),
        Row(cuda, "manual_seed manual_seed_all", use(s.manual_seed), "torch.manual_seed calls it"),
        Row(cuda, "seed seed_all", use(s.seed), "torch.seed calls it"),
        Row(cuda, "initial_seed", use(s.initial_seed), "the same"),
        Row(cuda, "default_generators", cpu_generators, "Megatron indexes it"),
        Row(cuda, "_lazy_call", use(s.call_now), "Megatron sets random states through it"),
        Row("torch.cuda.nvtx", "range_push range_pop range_end mark", answer(None), "no profiler"),
        Row("torch.cuda.nvtx", "range_start", answer(0), "the same"),
        Row("torch.cuda.nvtx", "range", no_context, "the same"),
        # torch's own optimizers (graph capture) and data loader (pinned memory) ask for this one.
        Row("torch.accelerator", "current_accelerator", answer(None), "there is none"),
        Row(
            "torch.utils.data.dataloader._BaseDataLoaderIter",
            "__init__",
            wrap(r.keeps_random_state),
            "draws a seed, and only where data is loaded: tensor-parallel ranks would draw apart",
        ),
        # Tensors and modules that are sent to a GPU stay where they are.
        Row(tensor, "cuda pin_memory", stay, "also serves torch.nn.Module.cuda"),
        Row(tensor, "to", wrap(r.mover), "also serves torch.nn.Module.to"),
        Row(
            cuda,
            "BFloat16Tensor BoolTensor ByteTensor CharTensor DoubleTensor FloatTensor HalfTensor "
            "IntTensor LongTensor ShortTensor",
            cpu_tensor_type,
            "types of tensors; Megatron asks isinstance",
        ),
        Row(tensor, "type", wrap(r.tensor_type), "Megatron looks for torch.cuda.FloatTensor"),
        Row(tensor, "record_stream", answer(None), "one stream"),
        Row(
            tensor,
            "new_empty new_empty_strided new_full new_ones new_tensor new_zeros",
            wrap(r.factory),
            "device=",
        ),
        Row("torch", f"{factories()} {LIKE} normal", wrap(r.factory), "device=, pin_memory="),
        Row("torch.fft", "fftfreq rfftfreq", wrap(r.factory), "device="),
        Row(
            "torch.utils._device.DeviceContext",
            "__init__",
            wrap(r.takes_device),
            "with torch.device(...), torch.set_default_device",
        ),
        Row("torch", "load", wrap(r.loader), "map_location="),
        Row(
            "torch.distributed",
            "init_process_group new_group",
            wrap(r.without_device_id),
            "gloo has no device",
        ),
        Row(
            "torch.distributed",
            "all_to_all_single",
            wrap(r.list_splits),
            "split sizes of the expert dispatcher",
        ),
        Row(
            "torch.distributed.distributed_c10d",
            those_that_exist("_create_gloo_process_group", torch.distributed.distributed_c10d),
            wrap(r.on_one_gloo_loop),
            "idle groups would take a good part of the CPU",
        ),
        # What is left leads into the driver: fail with a name.
        Row(cuda, "_lazy_init cudart", missing_name, "every first use of CUDA passes here"),
        Row(
            "torch._C",
            " ".join(n for n in dir(torch._C) if n.startswith("_cuda_") and n not in HARMLESS),
            missing_name,
            "the functions below torch.cuda",
        ),
        Row(
            cuda,
            those_that_exist(
                "utilization temperature power_draw clock_rate memory_usage memory_summary "
                "list_gpu_processes"
            ),
            missing_name,
            "numbers of a GPU",
        ),
        Row(
            cuda,
            those_that_exist(
                "CUDAGraph graph make_graphed_callables graph_pool_handle ExternalStream "
                "GreenContext MemPool use_mem_pool CUDAPluggableAllocator"
            ),
            missing_name,
            "graphs, foreign streams and memory pools",
        ),
        Row("torch", "Generator Stream Event", cpu_only_class, "they ask the driver themselves"),
    ]


LIKE = "empty_like full_like ones_like rand_like randint_like randn_like zeros_like"


def factories() -> str:
    """The functions of torch that torch itself lists as makers of tensors.

    The list is made on first use and then kept: here, while the originals are there.
    """
    names = {f.__name__ for f in _device_constructors()}
    return " ".join(n for n in sorted(names) if getattr(torch, n, None) in _device_constructors())


def those_that_exist(names: str, owner: Any = torch.cuda) -> str:
    """The names that this torch has in ``owner``: what is not there needs no row."""
    return " ".join(name for name in names.split() if hasattr(owner, name))


# They do not touch the driver, and torch asks them on a CPU too.
HARMLESS = frozenset({"_cuda_getCompiledVersion", "_cuda_isInBadFork", "_cuda_getArchFlags"})


def use(function: Callable[..., Any]) -> Callable[[str, Any], Any]:
    """Replace by ``function``, as a new object for each name, so that undoing is unambiguous."""

    def make(path: str, old: Any) -> Any:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return functools.update_wrapper(stand_in, old)

    return make


def answer(value: Any) -> Callable[[str, Any], Any]:
    """Replace by a function that ignores its arguments."""
    return use(lambda *args, **kwargs: value)


def wrap(wrapper: Callable[[Any], Any]) -> Callable[[str, Any], Any]:
    """Replace by a wrapper of the old function."""
    return lambda path, old: wrapper(old)


def stay(path: str, old: Any) -> Any:
    return use(lambda tensor, *args, **kwargs: tensor)(path, old)


def no_context(path: str, old: Any) -> Any:
    """A context manager of the same name that does nothing."""
    return type(path.rpartition(".")[2], (s.Nothing,), {})


def cpu_generators(path: str, old: Any) -> Any:
    return (torch.default_generator,) * s.device_count()


def cpu_tensor_type(path: str, old: Any) -> Any:
    cpu_type = getattr(torch, path.rpartition(".")[2])
    return proxy_class(cpu_type, "torch.cuda", cpu_type)


def missing_name(path: str, old: Any) -> Any:
    return missing_class(path, old) if isinstance(old, type) else missing_function(path, old)
