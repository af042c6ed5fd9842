"""Where in the code a collective was called."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

# Frames of torch and of what wraps functions are not what a reader looks for.
_LEFT_OUT = (
    "torch.", "contextlib", "megatron_paci.bench.", "megatron_paci.patching", "megatron_paci.cpu."
)
# They are about as long in every installation; the modules' names tell the rest.
_SHOWN_PARTS = 4
# A timer's barrier is called by the timer, which is called by itself.
_FRAMES = 3


class Collective(NamedTuple):
    """One kind of collective call: the function, the stages in its group, and who called it."""

    call: str
    stages: tuple[int, ...]
    site: str
    """``file.py:function:line`` of the innermost frame outside torch and this tool."""

    callers: tuple[str, ...]
    """The same for the frames above it, the nearest first."""

    @property
    def crosses(self) -> bool:
        """Whether the group spans pipeline stages."""
        return len(self.stages) > 1


def call_site() -> tuple[str, tuple[str, ...]]:
    """Return the innermost frame outside torch and this tool, and those above it."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < _FRAMES:
        module = f"{frame.f_globals.get('__name__', '')}."
        if not module.startswith(_LEFT_OUT):
            frames.append(_describe(frame))
        frame = frame.f_back
    return frames[0], tuple(frames[1:])


def _describe(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__", "")
    path = frame.f_code.co_filename.replace("\\", "/").split("/")
    # A module's file ends in the parts of its name: show these, so that it can be found.
    parts = name.count(".") + 1 + (path[-1] == "__init__.py")
    return f"{'/'.join(path[-min(parts, _SHOWN_PARTS):])}:{frame.f_code.co_name}:{frame.f_lineno}"
