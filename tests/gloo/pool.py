"""Ranks that stay alive between the runs of a test.

A run on ``n`` ranks takes the first ``n`` processes of the pool, which are started when they are
needed first. When a run fails, its processes have told what they were doing and are killed; the
next run starts new ones.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from pathlib import Path

from megatron_paci.bench import ranks
from tests.gloo.forked import ForkedRank


class RankPool:
    """Local processes that run scenarios (worker.py) one message after another.

    Attributes:
        folder: Receives outputs and results.
    """

    def __init__(self, folder: Path):
        """Start nothing yet; ``folder`` is made if it is not there."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._ranks: list[ForkedRank | subprocess.Popen] = []
        self._messages = 0

    def run(
        self, num_ranks: int, scenarios: dict[str, dict], *, seconds: float
    ) -> dict[str, list[dict]]:
        """Run ``scenarios`` one after another on ``num_ranks`` processes.

        Args:
            scenarios: Name to the parameters of ``worker.run_scenario``.
            seconds: Limit for all of them, and for starting processes where needed.

        Returns:
            Name to one result per rank, in rank order.

        Raises:
            ranks.RankError: A rank failed or the time is up. All processes are gone then, as also
                after any other exception, such as that of Ctrl-C.
        """
        number, self._messages = self._messages, self._messages + 1
        stores = ranks.meeting_points(len(scenarios))  # held open until the end of this call
        message = {
            "number": number,
            "world_size": num_ranks,
            "until": time.time() + seconds,
            "scenarios": [
                {"name": name, "port": store.port, **scenario}
                for store, (name, scenario) in zip(stores, scenarios.items())
            ],
        }
        files = [self.folder / f"{number}.rank{rank}.json" for rank in range(num_ranks)]
        try:
            self._start(num_ranks)
            for process in self._ranks[:num_ranks]:
                with contextlib.suppress(BrokenPipeError):  # it has ended: _wait says why
                    process.stdin.write(json.dumps(message).encode() + b"\n")
                    process.stdin.flush()
            self._wait(files, seconds)
        except BaseException:
            self.close()
            raise
        results = [json.loads(file.read_text()) for file in files]
        for file in files:
            file.unlink()
        return {name: [own[n] for own in results] for n, name in enumerate(scenarios)}

    def close(self) -> None:
        """End all processes; another run starts new ones."""
        ranks.kill(self._ranks)
        self._ranks.clear()

    def _start(self, num_ranks: int) -> None:
        while len(self._ranks) < num_ranks:
            environment = ranks.environment(len(self._ranks), num_ranks)
            self._ranks.append(ForkedRank(serve, self.folder, environment))

    def _wait(self, files: list[Path], seconds: float) -> None:
        end = time.monotonic() + seconds + 10  # the workers speak up by themselves before
        working = self._ranks[: len(files)]
        while not all(file.exists() for file in files):
            if any(process.poll() is not None for process in working):
                time.sleep(1)  # let the others say what they saw of it
                raise ranks.failure("a rank failed", working, self.folder)
            if time.monotonic() > end:
                raise ranks.failure(f"no end after {seconds + 10:g} s", working, self.folder)
            time.sleep(0.02)


def serve(folder: Path) -> None:
    """Be a rank that does what it is sent."""
    import tests.gloo.imported  # noqa: F401  (before worker.py, so that there is no GPU)
    from tests.gloo import worker

    worker.main(folder)
