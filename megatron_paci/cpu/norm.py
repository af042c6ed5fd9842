"""Layer norm for ``--sequence-parallel`` without a fused kernel.

With sequence parallelism each rank normalizes its own part of the sequence, so the gradients of the
norm's weights have to be summed over the tensor-parallel ranks. Megatron does that for parameters
marked ``sequence_parallel``. Its fused norms set the mark; its wrapper of torch's norm does not,
and refuses. The computation is the same, so here the wrapper is let through and the mark is set.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any


def with_sequence_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``WrappedTorchNorm.__new__``."""

    @functools.wraps(original)
    def __new__(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        asked = copy.copy(config)
        asked.sequence_parallel = False
        norm = original(cls, asked, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return __new__
