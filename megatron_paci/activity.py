"""What a rank is doing: for the watchdog, and as a note on whatever ends the training."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_paci.engine import Engine

logger = logging.getLogger(__name__)

NOTE = "megatron_paci"


class Activity:
    """Knows where the rank stands in the job, what it is at, and how far its engine is."""

    def __init__(self, pipeline: torch.distributed.ProcessGroup, engine: Engine):
        """Be between iterations, before the first one.

        Args:
            pipeline: The stages of this rank's pipeline.
            engine: The engine of this stage.
        """
        ranks = torch.distributed.get_process_group_ranks(pipeline)
        self._place = (
            f"rank {torch.distributed.get_rank()} (pipeline of ranks {' '.join(map(str, ranks))})"
        )
        self._engine = engine
        self._doing = "between iterations"
        self._iterations = 0
        self._beats = 0

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Name what happens meanwhile in ``describe``.

        Raises:
            BaseException: Whatever was raised meanwhile, with a note that holds the description.
        """
        before, self._doing = self._doing, what
        self.beat()
        try:
            yield
        except BaseException as error:
            if not any(note.startswith(NOTE) for note in getattr(error, "__notes__", ())):
                description = self.describe()
                error.add_note(f"{NOTE}: {description}")
                if isinstance(error, (Exception, KeyboardInterrupt)):  # no ordered end
                    # At once: a launcher may end this process before the traceback is printed.
                    logger.error("%s: %s; %s", type(error).__name__, error, description)
            raise
        finally:
            self._doing = before
            self.beat()

    def beat(self, *, iterations: int = 0) -> None:
        """Say that something outside of the schedule's actions is being done.

        Args:
            iterations: How many iterations of training that is.
        """
        self._beats += 1
        self._iterations += iterations

    def progress(self) -> tuple[int, ...]:
        """Return what is another tuple whenever something has been done."""
        engine = self._engine
        return engine.num_forwards, engine.num_backwards, engine.version, self._beats

    def describe(self) -> str:
        """Return one paragraph that says what this rank is doing; any thread may ask."""
        return (
            f"{self._place}, iteration {self._iterations} since the start, {self._doing}; "
            f"{self._engine.describe()}"
        )
