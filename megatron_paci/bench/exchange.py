"""How clocks travel between ranks: through the key-value store of the process group.

A second message beside each message would have to be posted, kept alive and waited for like the
first, would change the traffic under test, and could not be told apart on backends without tags.
The store has none of these troubles and serves every backend. A stamp is found by the name of its
group, its two ranks, its tag and its number, since messages with equal ones arrive in order.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from megatron_paci.bench.clock import Stamp


class Exchange:
    """One rank's access to the stamps of all ranks; keys are deleted once they were used."""

    def __init__(self, store: Any, *, rank: int):
        """Keep references.

        Args:
            store: Has ``set``, ``get``, ``add`` and ``delete_key`` of ``torch.distributed.Store``;
                ``get`` waits for the key. Nobody else may use its keys.
            rank: Global rank of this process.
        """
        self._store = store
        self._rank = rank
        self._numbers: Counter[str] = Counter()

    def number(self, *names: Any) -> str:
        """Return a key that is the n-th of these ``names``, on every rank that asks n times."""
        prefix = "/".join(map(str, names))
        self._numbers[prefix] += 1
        return f"{prefix}/{self._numbers[prefix]}"

    def post_message(self, group: str, receiver: int, tag: int, stamp: Stamp) -> None:
        """Send a stamp after the message that was just sent to ``receiver``, a global rank."""
        self._store.set(self.number("message", group, self._rank, receiver, tag), str(stamp))

    def message_key(self, group: str, sender: int, tag: int) -> str:
        """Return what ``take_message`` needs for the next receive from ``sender``."""
        return self.number("message", group, sender, self._rank, tag)

    def take_message(self, key: str) -> Stamp:
        """Return the stamp of a message; waits until it was sent."""
        text = self._store.get(key)
        self._store.delete_key(key)
        return Stamp.parse(_text(text))

    def enter(self, group: str, value: Any) -> str:
        """Enter a collective with ``str(value)``; return its key for ``members``."""
        key = self.number("collective", group)
        self._store.set(f"{key}/{self._rank}", str(value))
        return key

    def members(self, key: str, ranks: list[int]) -> list[str]:
        """Return what each of ``ranks`` has entered; waits until all have."""
        keys = [f"{key}/{rank}" for rank in ranks]
        values = [_text(self._store.get(key)) for key in keys]
        if self._store.add(f"{key}/readers", 1) == len(ranks):
            for used in [*keys, f"{key}/readers"]:
                self._store.delete_key(used)
        return values


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode()
