"""Ranks that are forked from one process that has imported Megatron, since that costs seconds.

The process is the fork server of Python's multiprocessing; it starts with the first rank and lives
as long as the process of the tests.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

_context = multiprocessing.get_context("forkserver")


class ForkedRank:
    """One rank, with what ``megatron_paci.bench.ranks`` uses of a ``subprocess.Popen``.

    Attributes:
        pid: Also the number of its process group, which all that it starts is in.
        stdin: File that it reads from as its standard input.
        returncode: Exit status, negative after a signal; None until it was seen to have ended.
    """

    def __init__(
        self, target: Callable[[Path], None], folder: Path, environment: dict[str, str]
    ):
        """Start it.

        Args:
            target: What the process does; it gets ``folder``.
            folder: Receives the output, in ``rank<r>.log``.
            environment: Variables of the process, RANK among them, beside those that importing
                Megatron needs.
        """
        # Not above: ranks import this file, too, and Megatron has them start servers of their own.
        _context.set_forkserver_preload(["tests.gloo.imported"])
        reader, writer = _context.Pipe(duplex=False)
        begun, begins = _context.Pipe(duplex=False)
        self._process = _context.Process(
            target=_run, args=(target, folder, environment, reader, begins)
        )
        self._process.start()
        reader.close()
        begins.close()
        begun.recv()  # EOFError: it has ended
        begun.close()
        self.stdin = os.fdopen(os.dup(writer.fileno()), "wb")
        writer.close()
        self.pid: int = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, None while the process runs."""
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self) -> int:
        """Return the exit status once the process has ended."""
        self._process.join()
        return self.poll()


def _run(target, folder, environment, reader, begins) -> None:
    """In the rank: become what ``subprocess.Popen`` would have started, then call ``target``."""
    os.setsid()
    log = os.open(
        folder / f"rank{environment['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    )
    for number, file in enumerate((reader.fileno(), log, log)):
        os.dup2(file, number)
    os.environ.update(environment)
    begins.send(None)
    begins.close()
    target(folder)
