"""CPU stand-ins for the parts of ``torch.cuda`` that Megatron uses.

There is one stream, and everything on it has finished when the call returns: waiting is a no-op.
There is one generator, that of the CPU. Nothing here computes what a model's numbers depend on.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def device_count() -> int:
    """As many devices as this machine runs ranks, so that each rank can have its own."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class CurrentDevice:
    """The index that ``set_device`` was last given, which is what Megatron expects back."""

    def __init__(self) -> None:
        self.index = 0

    def get(self) -> int:
        return self.index

    def set(self, device: Any) -> None:
        if not isinstance(device, int):
            device = torch.device(device).index or 0
        if device >= 0:  # a negative index means "leave it", as in torch
            self.index = device


class Stream:
    """The only stream: work is finished as soon as it is issued."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cpu")
        self.priority = priority
        self.cuda_stream = 0
        self.stream_id = 0

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class Event:
    """A point in host time."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``."""
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("Record both events before asking for the time between them.")
        return (end_event._seconds - self._seconds) * 1000.0

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Nothing:
    """A context manager for ``torch.cuda.stream(...)`` and ``torch.cuda.device(...)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: Any) -> None:
        pass


_STREAM = Stream()


def the_stream(device: Any = None) -> Stream:
    return _STREAM


def host_memory_peak(device: Any = None) -> int:
    """Largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def host_memory(device: Any = None) -> int:
    """Resident size of this process, in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def host_memory_total() -> int:
    return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()


def memory_info(device: Any = None) -> tuple[int, int]:
    """Free and total memory of the machine, in bytes."""
    return os.sysconf("SC_AVPHYS_PAGES") * resource.getpagesize(), host_memory_total()


class MemoryStatistics(dict):
    """Statistics of a device allocator that does not exist: resident size, and else zero."""

    def __missing__(self, key: str) -> int:
        return 0


def memory_stats(device: Any = None) -> MemoryStatistics:
    now, peak = host_memory(), host_memory_peak()
    return MemoryStatistics(
        {
            "allocated_bytes.all.current": now,
            "allocated_bytes.all.peak": peak,
            "reserved_bytes.all.current": now,
            "reserved_bytes.all.peak": peak,
        }
    )


# Ampere's number: the oldest with bfloat16, and before every path that asks for a newer kernel.
CAPABILITY = (8, 0)


def capability(device: Any = None) -> tuple[int, int]:
    return CAPABILITY


def properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="cpu",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=host_memory_total(),
        multi_processor_count=os.cpu_count() or 1,
        warp_size=32,
        is_integrated=True,
    )


# Random numbers. The names of torch.cuda must not call torch.manual_seed, which calls them.


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.default_generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state() for _ in range(device_count())]


def set_rng_state_all(new_states: Any) -> None:
    # All devices are the same generator; the first state is this rank's own.
    for state in list(new_states)[:1]:
        set_rng_state(state)


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def seed() -> None:
    torch.default_generator.seed()


def initial_seed() -> int:
    return torch.default_generator.initial_seed()


def call_now(callable: Callable[[], Any], **kwargs: Any) -> None:
    """For ``torch.cuda._lazy_call``: there is no initialization to wait for."""
    callable()
