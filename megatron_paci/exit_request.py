"""The wish to end training, carried along the pipeline.

Megatron gathers over all ranks, in every iteration, whether one of them got a signal or is out of
time. Here a stage puts its wish into the report that goes upstream; the first stage decides, and
its decision rides downstream with a forward of an iteration, so that all stages end after that one.
"""

from __future__ import annotations

from collections.abc import Callable


class ExitRequest:
    """One stage's part in ending training together.

    Attributes:
        decision: Bits ``EXIT_ON_*`` of report.py that all stages follow after this iteration.
    """

    def __init__(
        self,
        *,
        is_first: bool,
        local: Callable[[], int],
        agree: Callable[[int], int] = lambda requests: requests,
    ):
        """Nothing is requested yet.

        Args:
            is_first: Whether this is the stage that decides.
            local: Returns the bits that this rank wishes now.
            agree: Joins the bits over the replicas of this stage.
        """
        self._is_first = is_first
        self._local = local
        self._agree = agree
        self._wishes = 0
        self.decision = 0

    def wishes(self) -> int:
        """Return what this rank wishes, for the report upstream."""
        return self._local()

    def hear_wishes(self, requests: int) -> None:
        """Take the wishes of this and all later stages."""
        self._wishes |= requests

    def hear_decision(self, requests: int) -> None:
        """Take what the first stage has decided."""
        self.decision |= requests

    def announce(self) -> int:
        """Return the decision, to be sent downstream; on the first stage take it."""
        if self._is_first:
            self.hear_wishes(self._local())
            self.decide()
        return self.decision

    def decide(self) -> None:
        """Make the wishes heard so far the decision; at a drain every stage does, from the same."""
        self.decision |= self._agree(self._wishes)
