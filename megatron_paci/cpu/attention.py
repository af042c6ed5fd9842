"""Attention for ``--context-parallel-size`` without Transformer Engine.

With context parallelism a rank ``r`` of ``n`` holds two of the ``2 n`` chunks of each sequence,
``r`` and ``2 n - 1 - r`` (Megatron's ``get_batch_on_this_cp_rank``). Megatron leaves attention over
such a sequence to Transformer Engine; its own refuses. Here its own is let through, each rank with
its part of the queries and with the keys and values of the whole sequence, which it gathers: what
is computed for a token stays the same. The gradients of keys and values are summed over the ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch


def with_context_parallel_init(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``DotProductAttention.__init__``, which refuses context parallelism.

    The wrapper raises ValueError for a sliding window, whose mask Megatron builds from the number
    of queries and keys alone.
    """

    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.context_parallel_size == 1:
            original(self, config, *args, **kwargs)
            return
        if config.window_size is not None:
            raise ValueError(
                "megatron_paci CPU device: --window-size does not go with --context-parallel-size "
                "on the CPU. Leave one of them out."
            )
        asked = copy.copy(config)
        asked.context_parallel_size = 1
        original(self, asked, *args, **kwargs)
        self.config = config

    return __init__


def with_context_parallel(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``DotProductAttention.forward``."""

    @functools.wraps(original)
    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend from this rank's queries to all keys.

        Args:
            query: (sequence / ranks, microbatch size, heads, head size).
            key, value: (sequence / ranks, microbatch size, query groups, head size).
            attention_mask: True where not to look, (microbatch size, 1, sequence / ranks, sequence)
                as ``get_batch_on_this_cp_rank`` splits it; None for the causal one.

        Returns:
            (sequence / ranks, microbatch size, heads * head size).
        """
        if self.config.context_parallel_size > 1:
            from megatron.core.transformer.enums import AttnMaskType

            group = self.pg_collection.cp
            key, value = whole_sequence(key, group), whole_sequence(value, group)
            if attention_mask is None and self.attn_mask_type == AttnMaskType.causal:
                attention_mask = causal_mask(len(key), group.rank(), group.size())
        return original(self, query, key, value, attention_mask, *args, **kwargs)

    return forward


def whole_sequence(part: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """Gather the parts of all ranks, (sequence / ranks, ...), to (sequence, ...) in its true order.

    The backward sums over the ranks, and each gets the gradient of its part.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    # Named for what Megatron uses it for; it gathers along the first dimension over any group.
    gathered = gather_from_sequence_parallel_region(part, group=group)
    # By rank: 0, 2n-1, 1, 2n-2, ... So the first half is at even places, the second comes back.
    chunks = gathered.chunk(2 * group.size())
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])])


def causal_mask(sequence: int, rank: int, num_ranks: int) -> torch.Tensor:
    """Return where this rank's tokens must not look, (sequence / num_ranks, sequence)."""
    chunks = torch.arange(sequence).chunk(2 * num_ranks)
    positions = torch.cat([chunks[rank], chunks[2 * num_ranks - 1 - rank]])
    return torch.arange(sequence) > positions[:, None]
