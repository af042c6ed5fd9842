"""The processes that run scenarios: those of the gloo tests' pool, with another program."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_paci.bench import ranks
from tests.gloo.pool import RankPool

WORKER = Path(__file__).with_name("worker.py")


class DeviceRanks(RankPool):
    """Local processes that run ``worker.py``; they import Megatron once."""

    def __init__(self, folder: Path, device: str, environment: Mapping[str, str]):
        """Start nothing yet.

        Args:
            folder: Receives outputs and results.
            device: cuda or cpu.
            environment: Variables of the processes, beside those of this one.
        """
        super().__init__(folder)
        self._device = device
        self._environment = dict(environment)

    @property
    def started(self) -> int:
        """How many processes there are."""
        return len(self._ranks)

    def _start(self, num_ranks: int) -> None:
        before = os.environ.copy()
        os.environ.update(self._environment)
        try:
            while len(self._ranks) < num_ranks:
                program = (str(WORKER), self._device)
                self._ranks.append(ranks.start(len(self._ranks), num_ranks, self.folder, program))
        finally:
            os.environ.clear()
            os.environ.update(before)

    def _wait(self, files: list[Path], seconds: float) -> None:
        try:
            super()._wait(files, seconds)
        except ranks.RankError as error:
            # PACI says at this signal what it is doing, so the ranks that only wait say it, too.
            working: list[subprocess.Popen] = self._ranks[: len(files)]
            for process in working:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            time.sleep(2)
            reason = str(error).partition(";")[0]
            raise ranks.failure(reason, working, self.folder) from None
