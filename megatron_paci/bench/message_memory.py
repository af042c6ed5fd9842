"""Counts the memory that messages between stages take, under every schedule.

A message takes memory on the sender from the moment it is posted, on the receiver from the moment
its buffer is allocated, until nobody holds it any more: neither the communication nor the schedule
nor autograd. So what a stage received and keeps as the input of a backward pass counts here as
well as among the activations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_paci.patching import Patch, PatchSet


class MessageMeter:
    """Sees every message of this rank that goes through Megatron's ``P2PCommunicator``.

    Attributes:
        peak: Most bytes of messages held at once.
        largest: Bytes of the largest message.
        count: Messages sent and received so far.
    """

    def __init__(self):
        """Count nothing yet."""
        self.peak = 0
        self.largest = 0
        self.count = 0
        self._held: dict[StorageWeakRef, int] = {}
        self._patches = PatchSet([
            Patch(
                "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
                self._communicate, (), "counts the memory of messages",
            )
        ])

    def install(self) -> None:
        """Begin to count."""
        self._patches.install()

    def uninstall(self) -> None:
        """Stop."""
        self._patches.uninstall()

    def _communicate(self, original, *args, **kwargs):
        received_from_previous, received_from_next, requests = original(*args, **kwargs)
        self.note(
            kwargs["tensor_send_next"], kwargs["tensor_send_prev"],
            received_from_previous, received_from_next,
        )
        return received_from_previous, received_from_next, requests

    def note(self, *messages: torch.Tensor | None) -> None:
        """Take messages that were posted together; those of a direction that has none are None."""
        # Only here does it become more, so this is the place to see what is gone.
        self._held = {held: size for held, size in self._held.items() if not held.expired()}
        for message in messages:
            if message is not None:
                storage = message.untyped_storage()
                self._held[StorageWeakRef(storage)] = storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
                self.count += 1
        self.peak = max(self.peak, sum(self._held.values()))

    def figures(self) -> dict[str, Any]:
        """Return the attributes as plain values."""
        return {"peak": self.peak, "largest": self.largest, "count": self.count}
