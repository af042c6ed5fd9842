"""Sequences of bytes for the runs, and the forward step that reads them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch


class Text:
    """A text as bytes, cut into sequences.

    Attributes:
        digest: SHA-256 of the text.
    """

    def __init__(self, path: Path, sequence: int):
        """Read ``path``.

        Args:
            sequence: Bytes per sequence; the one byte more that labels need is the next one's.

        Raises:
            ValueError: The text is shorter than one sequence.
        """
        content = path.read_bytes()
        self.digest = hashlib.sha256(content).hexdigest()
        self._bytes = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._sequence = sequence
        self.num_sequences = (len(content) - 1) // sequence
        if self.num_sequences < 1:
            raise ValueError(f"{path} has {len(content)} bytes; a sequence needs {sequence + 1}")

    def take(self, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens and labels of sequences, (microbatch size, sequence)."""
        starts = torch.as_tensor(numbers) * self._sequence
        places = starts[:, None] + torch.arange(self._sequence + 1)
        text = self._bytes[places].long()
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def shuffled(num_sequences: int, seed: int, first: int) -> Iterator[int]:
    """Yield the numbers of sequences from sample ``first`` on; every epoch has its own order."""
    for epoch in itertools.count(first // num_sequences):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(num_sequences, generator=generator).tolist()
        yield from order[first % num_sequences:] if epoch == first // num_sequences else order


def microbatches(
    text: Text, numbers: Iterator[int], size: int, num_stages: int
) -> list[Iterator[tuple[torch.Tensor, torch.Tensor] | None]]:
    """Return the data of each stage: the first and the last read the same, others None."""
    batches = (text.take(chunk) for chunk in itertools.batched(numbers, size))
    first, last = itertools.tee(batches)
    middle = [itertools.repeat(None)] * (num_stages - 2)
    return [first, *middle, last] if num_stages > 1 else [first]


def forward_step(data_iterator, model):
    """Run one microbatch through a stage; return its output and the function of the loss."""
    batch = next(data_iterator)
    if batch is None:
        return model(None, None, None), loss
    tokens, labels = batch
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions, None, labels=labels), loss


def loss(losses: torch.Tensor):
    """Return the summed loss, the number of tokens, and both for the log."""
    total = losses.float().sum()
    num_tokens = torch.tensor(losses.numel(), dtype=torch.int)
    return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens.float()])}


def mean_loss(entries: Sequence[dict[str, torch.Tensor]]) -> float:
    """Return the mean over the tokens of several microbatches."""
    total = torch.stack([entry["lm loss"] for entry in entries]).sum(dim=0)
    return float(total[0] / total[1])
