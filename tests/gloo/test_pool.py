"""The harness itself: a hang ends and every rank says where, an error is told, nothing is left.

After either the next run is like the first.
"""

from __future__ import annotations

import os

import pytest

from tests.gloo.forked import ForkedRank
from tests.gloo.launch import RankError, flags
from tests.gloo.pool import RankPool


class RememberingPool(RankPool):
    """Knows the processes that it has ended."""

    def __init__(self, folder):
        super().__init__(folder)
        self.ended: list[ForkedRank] = []

    def close(self) -> None:
        self.ended += self._ranks
        super().close()
        assert not any(runs(rank) for rank in self.ended)


def runs(rank: ForkedRank) -> bool:
    """Whether the process or one that it has started is there."""
    try:
        os.killpg(rank.pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_runs_of_any_size_go_on_after_a_failure(tmp_path):
    pool = RememberingPool(tmp_path)
    try:
        small = {"arguments": flags(1, "--pipeline-schedule paci --train-iters 1")}
        before = pool.run(1, {"small": small}, seconds=200)["small"]

        paci = flags(2, "--pipeline-schedule paci --paci-accum 2")
        hang = {"arguments": paci, "hang": {"rank": 1, "action": "B1", "seconds": 5}}
        with pytest.raises(RankError) as hung:
            pool.run(2, {"hang": hang}, seconds=200)
        message = str(hung.value)
        assert "rank 1: no end after 5 s; rank 1 (pipeline of ranks 0 1), iteration 1 " in message
        # The other one has its gradient and waits for the report behind it.
        assert "PACI stage 0 of 2, accumulation 2: in action STEP" in message
        assert "last actions F0 F1 B0 F2 B1\n" in message
        assert len(pool.ended) == 2

        wrong = {"arguments": flags(2, "--pipeline-schedule paci --no-such-flag")}
        with pytest.raises(RankError, match="no-such-flag"):
            pool.run(2, {"wrong": wrong}, seconds=200)
        assert len(pool.ended) == 4
        after = pool.run(1, {"small": small, "again": small}, seconds=200)
        assert runs(pool._ranks[0])
    finally:
        pool.close()
    assert len(pool.ended) == 5 and pool.ended[-1].returncode == -9
    outcomes = [(seen["losses"], seen["weights"]) for [seen] in (before, *after.values())]
    assert outcomes == outcomes[:1] * 3
