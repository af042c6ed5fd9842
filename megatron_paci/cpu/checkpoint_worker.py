"""Megatron's process for ``--async-save --use-persistent-ckpt-worker``, without a GPU.

Megatron starts it anew, not as a copy of the training process, so it has no CPU device yet. And it
is given the tensors of the training process itself: on a GPU the first thing it does is to copy
them to the host, and training goes on after that. Those of a CPU are there already, shared by both
processes, and have to be copied all the same, else later iterations would end up in the checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_paci.cpu.device import CpuDevice


def run(*args: Any) -> None:
    """Do what ``PersistentAsyncCaller.async_loop`` does, on a CPU device of this process."""
    CpuDevice(in_checkpoint_worker=True).install()
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    PersistentAsyncCaller.async_loop(*args)


def with_copies(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Wrap ``FileSystemWriterAsync.preload_tensors``, which copies from a GPU to the host."""

    @functools.wraps(original)
    def preload_tensors(*args: Any, **kwargs: Any) -> list[Any]:
        return [
            (path, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for path, key, (data, tensors) in original(*args, **kwargs)
        ]

    return preload_tensors
