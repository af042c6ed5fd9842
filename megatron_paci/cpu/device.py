"""The CPU device: while it is installed, ``torch.cuda`` answers for the CPU."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from types import ModuleType
from typing import Any

from megatron_paci.cpu.after_import import AfterImport
from megatron_paci.cpu.norm import with_sequence_parallel
from megatron_paci.cpu.swap import Swaps

logger = logging.getLogger(__name__)

# torch.compile then gives back the function itself: Megatron compiles its fusions on import.
_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}

_TORCH_NORM = "megatron.core.transformer.torch_norm"
_ATTENTION = "megatron.core.transformer.dot_product_attention"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"
_WORKER = "megatron.core.dist_checkpointing.strategies.async_utils"

# Megatron warns when a GPU's random numbers have moved those of the CPU. Here they are the same.
_RANDOM_LOGGER = "megatron.core.tensor_parallel.random"
_RANDOM_WARNING = "CPU RNG state changed within GPU RNG context"


class CpuDevice:
    """Makes Megatron run on the CPU, from ``install`` to ``uninstall`` or in a ``with`` block.

    Only dispatch changes, no arithmetic: a tensor that would be on a GPU is on the CPU, and what is
    computed from it is computed by torch's own kernels. What is replaced, and why, stands in
    ``megatron_paci.cpu.table``; what is not covered raises ``CpuDeviceError``, which names it.
    A GPU that the machine may have is not touched.

    Install it before Megatron is imported, since Megatron looks at the GPU as it is imported.
    """

    _installed: CpuDevice | None = None

    def __init__(self, *, in_checkpoint_worker: bool = False) -> None:
        """Replace nothing yet.

        Args:
            in_checkpoint_worker: This process is one that Megatron has started for asynchronous
                checkpoints (checkpoint_worker.py); it starts none itself.
        """
        self._in_checkpoint_worker = in_checkpoint_worker
        self._swaps = Swaps()
        self._after_imports = [
            AfterImport(_TORCH_NORM, self._replace_norm),
            AfterImport(_ATTENTION, self._replace_attention),
            AfterImport(_OPTIMIZER, self._replace_optimizer),
            AfterImport(_WRITER, self._replace_writer),
        ]
        if not in_checkpoint_worker:
            self._after_imports.append(AfterImport(_WORKER, self._replace_worker))
        self._environment: dict[str, str | None] = {}
        self._new_builtins: list[int] = []

    def install(self) -> CpuDevice:
        """Replace every name of the table, or none.

        Raises:
            RuntimeError: a CPU device is installed already, or this process has used a GPU, or this
                version of torch lacks a name of the table.
        """
        if CpuDevice._installed is not None:
            raise RuntimeError(
                "megatron_paci CPU device: one is installed in this process already. Uninstall it "
                "first, or use the one that is there."
            )
        # A checkpoint worker begins with importing the launch script, and runs nothing compiled.
        if "megatron.core" in sys.modules and not self._in_checkpoint_worker:
            logger.warning(
                "Megatron was imported before the CPU device was installed: it has compiled "
                "functions that will ask for a compiler when they run. Install the device first."
            )
        try:
            self._install()
        except BaseException:
            self._undo()
            raise
        CpuDevice._installed = self
        return self

    def uninstall(self) -> None:
        """Put every name back, the same object as before.

        Raises:
            RuntimeError: this device is not installed, or another patch lies on top of it.
        """
        if CpuDevice._installed is not self:
            raise RuntimeError(
                "megatron_paci CPU device: this one is not installed, so it cannot be uninstalled. "
                "Call uninstall once, on the object that install was called on."
            )
        replaced = self._swaps.replaced_since()
        if replaced:
            raise RuntimeError(
                f"megatron_paci CPU device: replaced again since: {', '.join(replaced)}. Undo that "
                "first, then uninstall the CPU device."
            )
        self._undo()
        CpuDevice._installed = None

    def __enter__(self) -> CpuDevice:
        return self.install()

    def __exit__(self, kind: Any, *exception: Any) -> None:
        try:
            self.uninstall()
        except RuntimeError:
            if kind is None:
                raise
            # The exception on its way out is the one to show.
            logger.exception("the CPU device could not be uninstalled")

    def _install(self) -> None:
        for name, value in _ENVIRONMENT.items():
            self._environment[name] = os.environ.get(name)
            os.environ[name] = value

        import torch
        import torch._dynamo  # torch.optim needs it; its tables should hold the original functions
        import torch.distributed
        import torch.jit._builtins

        if torch.cuda.is_initialized():
            raise RuntimeError(
                "megatron_paci CPU device: this process has used a GPU already, and its tensors "
                "would meet those of the CPU. Install the CPU device first thing in a new process."
            )
        from megatron_paci.cpu.stand_ins import CurrentDevice
        from megatron_paci.cpu.table import table

        # Filled on first use, by what it finds in torch: do that while the originals are there.
        builtins = torch.jit._builtins._get_builtin_table()
        for row in table(CurrentDevice()):
            owner = _resolve(row.target)
            for name in row.names.split():
                old = getattr(owner, name, None)
                if old is None:
                    raise RuntimeError(
                        f"megatron_paci CPU device: {row.target}.{name} does not exist in torch "
                        f"{torch.__version__}. Use a version that megatron_paci was tried with."
                    )
                new = row.make(f"{row.target}.{name}", old)
                self._swaps.set(owner, name, new)
                if id(old) in builtins:  # so that torch.jit.script still knows the function
                    builtins[id(new)] = builtins[id(old)]
                    self._new_builtins.append(id(new))
        self._swaps.rebind()
        for after_import in self._after_imports:
            after_import.install()
        logging.getLogger(_RANDOM_LOGGER).addFilter(_is_not_the_random_warning)
        logger.debug("the CPU device is installed: %d names replaced", len(self._swaps))

    def _replace_norm(self, module: ModuleType) -> None:
        norm = module.WrappedTorchNorm
        self._swaps.set(norm, "__new__", staticmethod(with_sequence_parallel(norm.__new__)))

    def _replace_attention(self, module: ModuleType) -> None:
        from megatron_paci.cpu.attention import with_context_parallel, with_context_parallel_init

        attention = module.DotProductAttention
        self._swaps.set(attention, "__init__", with_context_parallel_init(attention.__init__))
        self._swaps.set(attention, "forward", with_context_parallel(attention.forward))

    def _replace_optimizer(self, module: ModuleType) -> None:
        from megatron_paci.cpu import distributed_optimizer as stand_in

        optimizer = module.DistributedOptimizer
        for name, wrap in (
            ("state_dict", stand_in.with_initial_state),
            ("load_state_dict", stand_in.with_own_counts),
            ("_set_main_param_and_optimizer_states", stand_in.without_counts),
        ):
            self._swaps.set(optimizer, name, wrap(vars(optimizer)[name]))

    def _replace_writer(self, module: ModuleType) -> None:
        from megatron_paci.cpu.checkpoint_worker import with_copies

        writer = module.FileSystemWriterAsync
        copying = with_copies(writer.preload_tensors)
        self._swaps.set(writer, "preload_tensors", staticmethod(copying))

    def _replace_worker(self, module: ModuleType) -> None:
        from megatron_paci.cpu.checkpoint_worker import run

        self._swaps.set(module.PersistentAsyncCaller, "async_loop", staticmethod(run))

    def _undo(self) -> None:
        """Undo what of ``_install`` has been done."""
        logging.getLogger(_RANDOM_LOGGER).removeFilter(_is_not_the_random_warning)
        for after_import in self._after_imports:
            after_import.uninstall()
        self._swaps.undo()
        if self._new_builtins:
            import torch.jit._builtins

            builtins = torch.jit._builtins._get_builtin_table()
            while self._new_builtins:
                del builtins[self._new_builtins.pop()]
        while self._environment:
            name, value = self._environment.popitem()
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _is_not_the_random_warning(record: logging.LogRecord) -> bool:
    return record.msg != _RANDOM_WARNING


def _resolve(path: str) -> Any:
    """The module or class at a dotted path."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)
