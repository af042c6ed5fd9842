"""A thread that says what this rank is doing when it stands still, or is told to end.

The main thread cannot: it waits in a communication library, where no Python code runs and no
exception comes up (NCCL aborts the whole process when its time-out is over). Every rank has its own
watchdog, so when one stage hangs all of them speak up.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

LAST_WORDS = 0.9
"""The part of the distributed time-out after which a rank that stands still speaks up at last."""

LONGEST_NAP = 1.0
"""Seconds between two looks at the progress; what is left of the time-out at last is not much more.
"""

SECONDS_TO_END = 10.0
"""How long an ordered end may take before the state is printed: launchers kill after about 30."""

_active: Watchdog | None = None


class Watchdog:
    """Prints the state of this rank to standard error, each time it stands still once.

    SIGTERM, which launchers send to the other ranks when one has failed, ends the process as it
    does by default, after the state was printed. A handler that is there already (Megatron's
    ``--exit-signal-handler``, a launch script's) is left to work.
    """

    def __init__(
        self, describe: Callable[[], str], progress: Callable[[], Any], *, stall_seconds: float
    ):
        """Watch nothing yet.

        Args:
            describe: Returns what this rank is doing, as one paragraph; called in another thread.
            progress: Returns a value that changes whenever something has been done.
            stall_seconds: How long it may stay the same before the state is printed.
        """
        self._describe = describe
        self._progress = progress
        self._stall_seconds = stall_seconds
        self._main_thread = threading.main_thread().ident
        self._ends_on_signal = False

    def start(self) -> None:
        """Start watching; in the main thread, which alone can handle signals."""
        global _active
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        if threading.current_thread() is threading.main_thread():
            self._ends_on_signal = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            if self._ends_on_signal:
                # Signals are written to the pipe only if Python handles them; the thread does it.
                signal.signal(signal.SIGTERM, lambda *_: None)
            self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        _active = self
        self._thread = threading.Thread(target=self._watch, name="PACI watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching and give the signal back its handler."""
        global _active
        _active = None
        self._restore_signals()
        os.write(self._write_end, b"\0")
        self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def _restore_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._wakeup_before)
            if self._ends_on_signal:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _watch(self) -> None:
        limit = self._stall_seconds
        seen, since, printed = self._progress(), time.monotonic(), False
        while True:
            if select.select([self._read_end], [], [], min(limit / 4, LONGEST_NAP))[0]:
                received = os.read(self._read_end, 4096)
                if 0 in received:
                    return
                if signal.SIGTERM in received:
                    if self._ends_on_signal:
                        self._print("SIGTERM")
                        os._exit(128 + signal.SIGTERM)
                if signal.SIGTERM in received or signal.SIGINT in received:
                    limit = min(limit, SECONDS_TO_END)
            if (now := self._progress()) != seen:
                seen, since, printed = now, time.monotonic(), False
            elif not printed and time.monotonic() - since >= limit:
                self._print(f"nothing has been done for {time.monotonic() - since:.0f} s")
                printed = True

    def _print(self, reason: str) -> None:
        frame = sys._current_frames().get(self._main_thread)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        # One write, so that the ranks that share a terminal do not mix their lines.
        message = f"megatron_paci: {reason}. {self._describe()}\n{stack}"
        os.write(2, message.encode(errors="replace"))


def _forget_in_child() -> None:
    """In a forked process (a data loader's, say): its signals are none of the parent's."""
    global _active
    if _active is not None:
        _active._restore_signals()
        _active = None


os.register_at_fork(after_in_child=_forget_in_child)
