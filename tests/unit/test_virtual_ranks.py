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

GOOD = "open(sys.argv[1] + '/0.rank' + os.environ['RANK'] + '.json', 'w').write('{}')"
HANGS = "print('stuck here', flush=True); import time; time.sleep(600)"
FAILS = "sys.exit('the reason')"


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs two ranks, each with a program of its own."""
    processes: list[subprocess.Popen] = []
    start = ranks.start

    def started(*args):
        processes.append(start(*args))
        return processes[-1]

    def run_programs(first, second, folder, runs=({},), *, seconds=60):
        code = f"import os, sys; exec({[first, second]}[int(os.environ['RANK'])])"
        return ranks.run_ranks(2, list(runs), folder, seconds=seconds, program=["-c", code])

    monkeypatch.setattr(ranks, "start", started)
    yield run_programs
    assert len(processes) == 2 and all(process.returncode is not None for process in processes)


def test_results_are_returned_in_rank_order(run, tmp_path):
    assert run(GOOD, GOOD, tmp_path, [{"script": "x"}]) == [[{}, {}]]
    [planned] = json.loads((tmp_path / "runs.json").read_text())
    assert planned["script"] == "x" and planned["port"] > 0


def test_a_failure_ends_the_others_and_shows_all_outputs(run, tmp_path):
    with pytest.raises(ranks.RankError, match="a rank failed") as error:
        run(HANGS, FAILS, tmp_path)
    assert "stuck here" in str(error.value) and "\nthe reason" in str(error.value)


def test_the_time_limit_ends_all(run, tmp_path):
    with pytest.raises(ranks.RankError, match="no end after 1 s"):
        run(GOOD, HANGS, tmp_path, seconds=1)


def test_when_the_time_is_up_ranks_say_where_they_are_and_what_they_did_last(run, tmp_path):
    speaks = (
        "import signal, time; handle = signal.signal; "
        "handle(signal.SIGUSR1, lambda *_: print('a stack', flush=True)); "
        "handle(signal.SIGTERM, lambda *_: sys.exit('the last action')); "
        "print('ready', flush=True); time.sleep(600)"
    )
    with pytest.raises(ranks.RankError, match="no end after 3 s") as error:
        run(GOOD, speaks, tmp_path, seconds=3)
    assert "ready\na stack\nthe last action" in str(error.value)


def test_an_interrupt_ends_all(run, tmp_path):
    # A process that was started in the background ignores the signal otherwise.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        run(HANGS, HANGS, tmp_path)
    interrupt.join()
    signal.signal(signal.SIGINT, before)


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
