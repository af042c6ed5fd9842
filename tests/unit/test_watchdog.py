"""The watchdog, each time in a process of its own that stands still in some way."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

START = """
import os, signal, sys, time
from megatron_paci.watchdog import Watchdog
done = [0]
watchdog = Watchdog(lambda: "rank 7 is in B3", lambda: done[0], stall_seconds={stall})
"""


def run(body: str, *, stall: float = 1000, signals: tuple[int, ...] = ()) -> tuple[int, str]:
    """Run a program; when it has printed "ready" send it signals.

    Returns:
        Its exit status, and what it wrote to both outputs.
    """
    program = START.format(stall=stall) + textwrap.dedent(body)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    try:
        output = ""
        if signals:
            while "ready" not in output:
                line = process.stdout.readline()
                assert line, output
                output += line
        for each in signals:
            process.send_signal(each)
        output += process.communicate(timeout=60)[0]
        return process.returncode, output
    finally:
        process.kill()


def test_standing_still_is_told_once_with_the_state_and_the_stack():
    status, output = run(
        """
        watchdog.start()
        def wait_for_the_neighbour():
            time.sleep(1)
        wait_for_the_neighbour()
        watchdog.stop()
        """,
        stall=0.1,
    )
    assert status == 0
    assert output.count("nothing has been done for 0 s. rank 7 is in B3") == 1
    assert "in wait_for_the_neighbour" in output


def test_it_looks_often_enough_to_speak_before_the_time_out():
    """A time-out of a minute leaves 6 seconds after the limit."""
    _, output = run(
        """
        import select
        original, naps = select.select, []
        select.select = lambda *args: naps.append(args[3]) or original(*args)
        watchdog.start()
        time.sleep(0.2)
        watchdog.stop()
        print(f"{len(naps)} naps, the longest {max(naps)} s")
        """,
        stall=54,
    )
    assert output == "1 naps, the longest 1.0 s\n"


def test_it_speaks_again_after_something_was_done():
    _, output = run(
        """
        watchdog.start()
        time.sleep(1); done[0] += 1; time.sleep(1)
        watchdog.stop()
        """,
        stall=0.1,
    )
    assert output.count("rank 7 is in B3") == 2


def test_who_works_is_left_in_peace():
    _, output = run(
        """
        watchdog.start()
        for _ in range(100):
            time.sleep(0.01); done[0] += 1
        watchdog.stop()
        """,
        stall=30,
    )
    assert output == ""


def test_an_ordered_end_tells_the_state_though_the_main_thread_runs_no_python():
    """A lock of C code that nothing interrupts, as a receive of a communication library is."""
    status, output = run(
        """
        watchdog.start()
        import ctypes
        lock = ctypes.create_string_buffer(128)
        ctypes.CDLL(None).pthread_mutex_lock(lock)
        print("ready", flush=True)
        ctypes.CDLL(None).pthread_mutex_lock(lock)
        """,
        signals=(signal.SIGTERM,),
    )
    assert status == 128 + signal.SIGTERM
    assert "SIGTERM. rank 7 is in B3" in output


def test_a_handler_that_is_there_does_its_work():
    status, output = run(
        """
        def handler(*_):
            print("handled", flush=True); watchdog.stop(); sys.exit(3)
        signal.signal(signal.SIGTERM, handler)
        watchdog.start()
        print("ready", flush=True)
        time.sleep(60)
        """,
        signals=(signal.SIGTERM,),
    )
    assert status == 3
    assert "handled" in output and "rank 7" not in output


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_handler_that_does_not_come_to_an_end_is_told_of(name):
    _, output = run(
        f"""
        import megatron_paci.watchdog
        megatron_paci.watchdog.SECONDS_TO_END = 0.1
        signal.signal(signal.{name}, lambda *_: None)
        watchdog.start()
        print("ready", flush=True)
        time.sleep(2)
        """,
        signals=(getattr(signal, name),),
    )
    assert "nothing has been done for" in output


def test_signals_of_forked_processes_are_not_the_parents():
    """Data loaders end their workers by SIGTERM."""
    status, output = run(
        """
        watchdog.start()
        child = os.fork()
        if child == 0:
            time.sleep(60)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        print("child", os.WTERMSIG(os.waitpid(child, 0)[1]))
        time.sleep(0.2)
        watchdog.stop()
        """
    )
    assert (status, output) == (0, f"child {int(signal.SIGTERM)}\n")


@pytest.mark.parametrize("before", ["signal.SIG_DFL", "signal.SIG_IGN"])
def test_stopping_gives_everything_back(before):
    status, output = run(
        f"""
        import threading
        signal.signal(signal.SIGTERM, {before})
        handles = len(os.listdir("/proc/self/fd"))
        watchdog.start(); watchdog.stop()
        assert signal.getsignal(signal.SIGTERM) is {before}
        assert signal.set_wakeup_fd(-1) == -1
        assert len(os.listdir("/proc/self/fd")) == handles
        assert threading.active_count() == 1
        """
    )
    assert (status, output) == (0, "")
