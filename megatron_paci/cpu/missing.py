"""What happens when a program reaches CUDA through something that the CPU device does not cover.

The driver's own message ("Found no NVIDIA driver") would say nothing about the cause, so the ways
into CUDA are closed by guards that name the missing piece and the line that asked for it. Only the
dispatcher below torch (``torch.ops.aten``) and the private classes of ``torch._C`` have no guard.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn


class CpuDeviceError(RuntimeError):
    """Something that needs a GPU was used while the CPU device was installed."""


def missing(what: str, frame: FrameType | None) -> CpuDeviceError:
    """The error for ``what``, or for the function of ``torch.cuda`` through which it was reached.

    Args:
        what: the piece that was called.
        frame: the stack frame of the call.
    """
    if what == "torch.cuda._lazy_init":
        what = "a tensor on a CUDA device"  # torch calls it from C++ before it makes one
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch.cuda"):
        function = frame.f_code.co_qualname.removesuffix(".__init__").removesuffix(".__new__")
        what = f"{frame.f_globals['__name__']}.{function}"
        frame = frame.f_back
    where = f" (called from {frame.f_code.co_filename}:{frame.f_lineno})" if frame else ""
    return CpuDeviceError(
        f"megatron_paci CPU device: {what} is not available on the CPU{where}. Leave out the "
        "option that needs it, or run on a GPU without the CPU device."
    )


def missing_function(what: str, original: Any) -> Callable[..., NoReturn]:
    """A function that looks like ``original`` and can only be called in vain."""

    def not_on_the_cpu(*args: Any, **kwargs: Any) -> NoReturn:
        raise missing(what, sys._getframe(1))

    return functools.update_wrapper(not_on_the_cpu, original)


def missing_class(what: str, original: type) -> type:
    """A subclass of ``original`` that cannot be instantiated.

    A subclass, because code that only mentions the class (an annotation, ``hasattr``) is fine.
    """

    def not_on_the_cpu(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise missing(what, sys._getframe(1))

    body = {"__new__": not_on_the_cpu, "__module__": original.__module__}
    return type(original)(original.__name__, (original,), body)


def cpu_only_class(what: str, original: type) -> type:
    """``original``, which cannot be subclassed, without the choice of a CUDA device."""

    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, int) or str(device).startswith("cuda"):
            raise missing(f"{what} on a CUDA device", sys._getframe(2))
        return original(*args, **kwargs)

    return proxy_class(original, original.__module__, make)


def proxy_class(target: type, module: str, make: Callable[..., Any]) -> type:
    """A class of its own identity that stands for ``target``; ``make`` makes its instances."""

    class Proxy(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, target)

        def __getattr__(cls, name: str) -> Any:
            return getattr(target, name)

    return Proxy(target.__name__, (), {"__module__": module})
