"""No rank of a benchmark outlives it, whatever happens; with other programs in their place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from megatron_paci.bench import ranks

GOOD = "import json, sys; json.dump({}, open(sys.argv[1] + '/0.rank' + sys.argv[2] + '.json', 'w'))"
HANGS = "print('stuck here', flush=True); import time; time.sleep(600)"
FAILS = "import sys; sys.exit('the reason')"


@pytest.fixture
def started(monkeypatch):
    """Let ranks run the programs in the list that this returns; and the processes started."""
    programs: list[str] = []
    processes: list[subprocess.Popen] = []

    def start(rank, num_ranks, folder):
        with ranks._log(folder, rank).open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", programs[rank], str(folder), str(rank)],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
                )
            )
        return processes[-1]

    monkeypatch.setattr(ranks, "_start", start)
    yield programs, processes
    assert len(processes) == 2 and all(process.returncode is not None for process in processes)


def test_results_are_returned_in_rank_order(started, tmp_path):
    started[0].extend([GOOD, GOOD])
    assert ranks.run_ranks(2, [{"script": "x"}], tmp_path, seconds=60) == [[{}, {}]]
    [run] = json.loads((tmp_path / "runs.json").read_text())
    assert run["script"] == "x" and run["port"] > 0


def test_a_failure_ends_the_others_and_shows_all_outputs(started, tmp_path):
    started[0].extend([HANGS, FAILS])
    with pytest.raises(ranks.RankError, match="a rank failed") as error:
        ranks.run_ranks(2, [{}], tmp_path, seconds=60)
    assert "stuck here" in str(error.value) and "\nthe reason" in str(error.value)


def test_the_time_limit_ends_all(started, tmp_path):
    started[0].extend([GOOD, HANGS])
    with pytest.raises(ranks.RankError, match="no end after 1 s"):
        ranks.run_ranks(2, [{}], tmp_path, seconds=1)


def test_an_interrupt_ends_all(started, tmp_path):
    started[0].extend([HANGS, HANGS])
    interrupt = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        ranks.run_ranks(2, [{}], tmp_path, seconds=60)
    interrupt.join()


def test_a_rank_ends_when_its_parent_is_gone():
    code = (
        "import time; from megatron_paci.bench.rank import end_with_parent; end_with_parent(); "
        "print(1, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"1\n"
        time.sleep(0.1)
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(30) == 70
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
