"""Long runs hold no more than short ones, and equal runs are equal whatever else runs beside them.

What a rank holds is counted twice and has to be the same to the last entry and the last byte; only
the memory of the process, which the allocator decides on, has a bound.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gloo.counted_gpt import MESSAGE
from tests.gloo.launch import flags, launch, shared_ranks
from tests.gloo.observed import output
from tests.gloo.scenarios import TIED

# One layer per stage, and large messages; see MESSAGE in counted_gpt.py.
TRAINED = (
    "--num-layers 2 --hidden-size 128 --micro-batch-size 8 --global-batch-size 8 --vocab-size 127 "
    "--pipeline-schedule paci --paci-accum 1"
)
LONG = {
    # name: (iterations or rounds between which nothing may grow, flags); the first warms up
    "rebuilt": ((2, 20), "--eval-iters 0 --rounds 20 --dataloader-type cyclic"),
    "undrained": ((100, 300), "--eval-iters 0"),
    "drained": ((100, 300), "--eval-interval 10 --eval-iters 1"),
    "leaking": ((50, 100), "--eval-iters 0 --leak"),
}
# The learning rate rises to a hundred times what suits it.
RISING = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 4 "
    "--max-position-embeddings 16 --global-batch-size 4 --vocab-size 127 --train-iters 80 --lr 1 "
    "--lr-warmup-fraction 0.9 --eval-iters 0 --pipeline-schedule paci --paci-accum 1"
)
WARNED = ("the loss has risen: its mean over", "the loss hardly falls: its mean over")
EXACT = ("storage", "handles", "threads", "groups", "stages", "held")
SEED = (
    "--attention-dropout 0.1 --hidden-dropout 0.1 --clip-grad 0.3 --seed 7 "
    "--pipeline-schedule paci --paci-accum 2"
)


@contextlib.contextmanager
def busy_processes(count: int):
    """Keep ``count`` cores busy meanwhile; yield the processes."""
    program = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(program) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def seconds_of_computing(process: subprocess.Popen) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("endurance")


@pytest.fixture(scope="module")
def counted(folder):
    """By name, for each rank, what it held at the two points; the record's folder is ``record``."""
    scenarios = {}
    for name, ((first, last), extra) in LONG.items():
        iterations = 2 if name == "rebuilt" else last + 10
        recorded = f"--paci-record {folder / 'record'}" if name == "drained" else ""
        scenarios[name] = {
            "script": "tests/gloo/counted_gpt.py",
            "arguments": flags(
                2,
                f"{TRAINED} {extra} {recorded} --train-iters {iterations} "
                f"--count {folder / name} --count-at {first} {last}",
                TIED,
            ),
        }
    scenarios["rising"] = {"arguments": flags(2, RISING, TIED)}
    launch(2, scenarios, folder / "counted", seconds=300)
    for name in scenarios:
        for rank in (0, 1):
            text = output(shared_ranks().folder, rank, name)
            (folder / f"{name}.rank{rank}.log").write_text(text)
    return {
        name: [json.loads((folder / f"{name}.rank{rank}.json").read_text()) for rank in (0, 1)]
        for name in LONG
    }


@pytest.fixture(scope="module")
def equal_runs(folder):
    """By number of stages, runs of the same training."""
    found = {}
    for num_stages in (2, 4):
        run = {"arguments": flags(num_stages, SEED, TIED)}
        runs = launch(
            num_stages, {"first": run, "again": dict(run)}, folder / str(num_stages), seconds=200
        )
        with busy_processes(2) as processes:
            runs |= launch(
                num_stages, {"busy": {**run, "sleep_ms": 5}}, folder / f"{num_stages}-busy",
                seconds=200,
            )
            runs["computed"] = [seconds_of_computing(process) for process in processes]
        found[num_stages] = runs
    return found


@pytest.mark.parametrize("key", EXACT)
@pytest.mark.parametrize("name", ["undrained", "drained", "rebuilt"])
def test_nothing_grows(counted, name, key):
    """300 iterations hold what 100 do, 20 stages in a row what two do."""
    for first, last in counted[name]:
        if key == "storage":
            # A scalar that lives for a moment may be among them; one that is kept in every
            # iteration would make 800 bytes, one in every round 72.
            assert abs(last[key] - first[key]) < 64
        else:
            assert last[key] == first[key]
    assert len(counted["undrained"][0][0]["held"]) > 20


@pytest.mark.parametrize("name", ["undrained", "drained"])
def test_memory_does_not_grow_by_half_a_message_per_iteration(counted, name):
    for first, last in counted[name]:
        assert last["resident"] - first["resident"] < 200 * 4 * MESSAGE / 2


def test_the_record_grows_by_one_entry_per_iteration(counted, folder):
    """The only thing that grows by design: numbers, no tensors."""
    for rank, (first, last) in enumerate(counted["drained"]):
        for entry, iterations in ((first["record"], 100), (last["record"], 300)):
            assert {entry[f"record._{name}"] for name in ("losses", "grad_norms", "ends")} == {
                iterations
            }
            # Evaluated every 10 iterations, this one's evaluation is still to come.
            assert entry["record._evaluations"] == iterations // 10 - 1
            assert entry["record._meter._kept"] == 0
        size = (folder / "record" / f"rank{rank}.json").stat().st_size
        assert size < 310 * 150


@pytest.mark.usefixtures("counted")
def test_a_loss_that_rises_is_told_once_by_the_rank_that_logs(folder):
    """And none of the runs that learn, for 300 iterations, says such a thing."""
    texts = {(name, rank): (folder / f"{name}.rank{rank}.log").read_text()
             for name in (*LONG, "rising") for rank in (0, 1)}
    warned = {place: [text.count(words) for words in WARNED] for place, text in texts.items()}
    assert warned.pop(("rising", 1)) == [1, 0]
    assert set(map(tuple, warned.values())) == {(0, 0)}
    text = (folder / "rising.rank1.log").read_text()
    assert "up to 1 optimizer steps late (--paci-accum 1)" in text and "compare --short" in text


@pytest.mark.parametrize("key", ["storage", "handles", "held", "resident"])
def test_a_planted_leak_is_found(counted, key):
    """Guards the tests above: see ``--leak`` of counted_gpt.py."""
    for first, last in counted["leaking"]:
        if key == "resident":
            assert last[key] - first[key] > 50 * 4 * MESSAGE / 2
        else:
            assert last[key] != first[key]


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("other", ["again", "busy"])
def test_7_equal_runs_are_equal_beside_busy_processes_too(equal_runs, num_stages, other):
    """Tied, clipped, with dropout; the busy run also sleeps at random after its actions."""
    runs = equal_runs[num_stages]
    for one, two in zip(runs["first"], runs[other], strict=True):
        for key in ("losses", "grad_norms", "evaluations", "weights", "optimizer", "actions"):
            assert two[key] == one[key], key
    assert len(runs["first"][-1]["losses"]) == 4
    assert min(runs["computed"]) > 0.1
