"""Numbers that are computed on a device and read later, so that nobody waits for the device."""

from __future__ import annotations

from typing import Any

import torch

BATCH = 10


class LateValues:
    """Copies scalars to the host, ``BATCH`` at a time, and returns those that have arrived."""

    def __init__(self):
        self._new: list[tuple[Any, torch.Tensor]] = []
        self._copies: list[tuple[list[Any], torch.Tensor, torch.cuda.Event | None]] = []

    def put(self, key: Any, value: torch.Tensor) -> list[tuple[Any, float]]:
        """Take a scalar with a key; return pairs of earlier ones, in the order they were put."""
        self._new.append((key, value))
        if len(self._new) == BATCH:
            keys, values = zip(*self._new)
            self._new.clear()
            copy = torch.stack(values).to("cpu", non_blocking=True)  # into pinned memory
            event = None
            if value.is_cuda:
                event = torch.cuda.Event()
                event.record()
            self._copies.append((keys, copy, event))
        arrived = []
        while self._copies and (self._copies[0][2] is None or self._copies[0][2].query()):
            keys, copy, _ = self._copies.pop(0)
            arrived += zip(keys, copy.tolist(), strict=True)
        return arrived
