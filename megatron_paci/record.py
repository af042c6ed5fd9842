"""A record of one training run, per rank, under any schedule: what comparisons are made from.

Off unless ``--paci-record DIR`` is given. Losses are taken from the training step itself, not from
log lines, which average over iterations.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.training import get_args

from megatron_paci.optimizers import optimizer_parts
from megatron_paci.run_facts import run_facts

# Activations are counted in the first iterations only: a pipeline has filled by then, and later
# iterations are timed without the cost of counting.
COUNTED_ITERATIONS = 3


class ActivationMeter:
    """Counts the bytes that autograd keeps for backward passes, parameters left out.

    Attributes:
        peak: Most bytes kept at once.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        self._parameters = {_storage_key(parameter) for parameter in parameters}
        self._kept: dict[int, int] = {}
        self._bytes = 0
        self.peak = 0

    def counting(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context in which everything saved for backward is counted until it is freed."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: torch.Tensor) -> _Kept:
        return _Kept(tensor, None if _storage_key(tensor) in self._parameters else self)

    def add(self, key: int, size: int) -> None:
        """Count one more user of a storage of ``size`` bytes."""
        users = self._kept.get(key, 0)
        self._kept[key] = users + 1
        if not users:
            self._bytes += size
            self.peak = max(self.peak, self._bytes)

    def remove(self, key: int, size: int) -> None:
        """Count one user less."""
        self._kept[key] -= 1
        if not self._kept[key]:
            del self._kept[key]
            self._bytes -= size


class _Kept:
    """A tensor saved for backward; tells the meter when autograd lets go of it."""

    __slots__ = ("tensor", "_meter", "_key", "_size")

    def __init__(self, tensor: torch.Tensor, meter: ActivationMeter | None):
        self.tensor = tensor
        self._meter = meter
        if meter is not None:
            self._key, self._size = _storage_key(tensor), tensor.untyped_storage().nbytes()
            meter.add(self._key, self._size)

    def __del__(self):
        if self._meter is not None:
            self._meter.remove(self._key, self._size)


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Recorder:
    """Collects one rank's record and writes it as ``DIR/rank<r>.json`` at the end of training."""

    def __init__(
        self,
        directory: str,
        model: Sequence[torch.nn.Module],
        optimizer: Any,
        validation: Any,
    ):
        """Begin a record.

        Args:
            directory: Folder of the file.
            model: The model chunks of this rank.
            optimizer: Megatron's optimizer of this rank.
            validation: The iterator, or list of iterators, over the validation set; an evaluation
                on another one is that of the test set.
        """
        self._path = Path(directory) / f"rank{torch.distributed.get_rank()}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._parameters = [p for chunk in model for p in chunk.parameters()]
        self._optimizer = optimizer
        self._validation = validation
        self._run = run_facts(get_args()) | {"device": _device_name(self._parameters)}
        self._meter = ActivationMeter(self._parameters)
        self._start = time.perf_counter()
        self._samples: list[int] = []
        self._losses: list[dict[str, float]] = []
        self._grad_norms: list[float | None] = []
        self._ends: list[float] = []
        self._evaluations: list[dict[str, Any]] = []
        self._finished = False
        self._statistics: dict[str, Any] | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context of one training step."""
        early = len(self._ends) < COUNTED_ITERATIONS
        with self._meter.counting() if early else nullcontext():
            yield

    def iteration(self, result: tuple) -> None:
        """Note the result of a training step."""
        losses, grad_norm = result[0], result[5]
        self._losses.append({name: float(value) for name, value in losses.items()})
        self._grad_norms.append(None if grad_norm is None else float(grad_norm))
        self._ends.append(time.perf_counter() - self._start)
        # Read after the step, whose number of microbatches it still is.
        self._samples.append(get_current_global_batch_size())

    def evaluation(self, result: tuple, data: Any) -> None:
        """Note the result of an evaluation on what the iterator ``data`` reads."""
        losses = {name: float(value) for name, value in (result[0] or {}).items()}
        sets = self._validation if isinstance(self._validation, list) else [self._validation]
        validates = data is self._validation or any(data is each for each in sets)
        self._evaluations.append({
            "after_iterations": len(self._ends),
            "data_set": "validation" if validates else "test",
            "losses": losses,
        })
        if self._finished:  # the final evaluation comes after training
            self.write(self._statistics)

    def write(self, statistics: dict[str, Any] | None) -> None:
        """Write the record at the end of training; a later evaluation is added to it.

        Args:
            statistics: Counters of the PACI engine, None under other schedules.
        """
        self._finished, self._statistics = True, statistics
        record = {
            "run": self._run,
            "losses": self._losses,
            "grad_norms": self._grad_norms,
            "seconds_at_end": self._ends,
            "samples": self._samples,
            "counted_iterations": min(COUNTED_ITERATIONS, len(self._ends)),
            "evaluations": self._evaluations,
            "bytes": {
                "parameters": _bytes(self._parameters),
                "gradients": _bytes(
                    p.main_grad for p in self._parameters if hasattr(p, "main_grad")
                ),
                "optimizer": _bytes(
                    value
                    for state in _optimizer_states(self._optimizer)
                    for value in state.values()
                    if torch.is_tensor(value)
                ),
                "activations_peak": self._meter.peak,
                **_device_peak(self._parameters),
            },
            "paci": statistics,
        }
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=1))
        temporary.replace(self._path)


def _device_name(parameters: Sequence[torch.nn.Parameter]) -> str:
    if parameters and parameters[0].is_cuda:
        return torch.cuda.get_device_name()
    return "cpu"


def _device_peak(parameters: Sequence[torch.nn.Parameter]) -> dict[str, int]:
    """Return the most memory of this process on its GPU since it began; nothing on a CPU."""
    if not (parameters and parameters[0].is_cuda):
        return {}
    return {
        "device_allocated_peak": torch.cuda.max_memory_allocated(),
        "device_reserved_peak": torch.cuda.max_memory_reserved(),
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _optimizer_states(optimizer: Any) -> Iterator[dict[str, Any]]:
    for part in optimizer_parts(optimizer):
        if part is not None and getattr(part, "optimizer", None) is not None:
            yield from part.optimizer.state.values()
