"""What a rank of a distributed test looks at, and what it can do to its own training."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import math
import os
import signal
from collections import deque


def digest(tensors) -> str:
    """Return a hash over the bytes of tensors, in order."""
    import torch

    total = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def optimizer_tensors(optimizer):
    """Yield the state of every parameter, in the order of the parameter groups."""
    import torch

    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                for _, value in sorted(part.optimizer.state[parameter].items()):
                    yield value if torch.is_tensor(value) else torch.tensor(float(value))


def live_storage_bytes() -> int:
    """Return the bytes of all tensor storages made in this scenario that Python can reach."""
    import torch

    gc.collect()
    storages = {}
    for item in gc.get_objects():
        with contextlib.suppress(Exception):
            if isinstance(item, torch.Tensor):
                storage = item.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def plant_nan(stage, microbatch: int, where: str) -> None:
    """Make one pass of this stage return NaN; a backward spoils a weight gradient as well."""
    compute, model = stage.compute, stage.model
    if where == "forward":
        original = compute.forward

        def forward(index, *args):
            output = original(index, *args)
            return output * math.nan if index == microbatch else output

        compute.forward = forward
        return
    original, count = compute.backward, itertools.count()

    def backward(*args):
        gradient = original(*args)
        if next(count) == microbatch:
            next(model.parameters()).main_grad.fill_(math.nan)
            if gradient is not None:
                gradient.fill_(math.nan)
        return gradient

    compute.backward = backward


def wish_to_end(how: str) -> None:
    """Send this process a signal, or let its time be over."""
    if how == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        from megatron.training import training

        training._TRAIN_START_TIME -= 3600


def held(item, path: str) -> dict[str, int]:
    """Return the length of every collection that objects of the plugin hold, by path."""
    found, seen = {}, set()

    def walk(item, path: str) -> None:
        if id(item) in seen:
            return
        if isinstance(item, list | tuple | dict | set | deque):
            seen.add(id(item))
            found[path] = len(item)
            entries = item.values() if isinstance(item, dict) else item
            for entry in entries:
                walk(entry, f"{path}[]")
        elif type(item).__module__.startswith("megatron_paci"):
            seen.add(id(item))
            names = [*getattr(item, "__dict__", ()), *getattr(item, "__slots__", ())]
            for name in names:
                walk(getattr(item, name, None), f"{path}.{name}")

    walk(item, path)
    return found
