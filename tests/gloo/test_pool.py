"""The pool of ranks: a failure is told and ends its processes, and the next run is like the first.
"""

from __future__ import annotations

import pytest

from tests.gloo.launch import RankError, flags
from tests.gloo.pool import RankPool


def test_runs_of_any_size_go_on_after_a_failure(tmp_path):
    pool = RankPool(tmp_path)
    try:
        small = {"arguments": flags(1, "--pipeline-schedule paci --train-iters 1")}
        before = pool.run(1, {"small": small}, seconds=200)["small"]

        paci = flags(2, "--pipeline-schedule paci --paci-accum 2")
        hang = {"arguments": paci, "hang": {"rank": 1, "action": "B1", "seconds": 5}}
        with pytest.raises(RankError, match="rank 1: no end after 5 s; rank 1 ") as hung:
            pool.run(2, {"hang": hang}, seconds=200)
        assert "last actions F0 F1 B0 F2 B1\n" in str(hung.value)

        wrong = {"arguments": flags(1, "--no-such-flag")}
        with pytest.raises(RankError, match="no-such-flag"):
            pool.run(1, {"wrong": wrong}, seconds=200)
        after = pool.run(1, {"small": small, "again": small}, seconds=200)
        processes = list(pool._ranks)
        assert len(processes) == 1 and processes[0].poll() is None
    finally:
        pool.close()
    assert processes[0].returncode is not None
    outcomes = [(seen["losses"], seen["weights"]) for [seen] in (before, *after.values())]
    assert outcomes == outcomes[:1] * 3
