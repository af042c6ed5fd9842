"""Virtual time without processes: arithmetic, costs, results, and what the command refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from megatron_paci.__main__ import main
from megatron_paci.bench import virtual_command
from megatron_paci.bench.call_sites import Collective, call_site
from megatron_paci.bench.clock import Stamp, VirtualClock
from megatron_paci.bench.costs import Costs, per_stage
from megatron_paci.bench.exchange import Exchange
from megatron_paci.bench.ranks import RankError
from megatron_paci.bench.results import job_result, stage_result
from megatron_paci.bench.virtual import VirtualRun, measure

WORLD = Collective("all_reduce", (0, 1), "a.py:f:1", ("b.py:g:2",))


class FakeStore(dict):
    """A ``torch.distributed.Store`` in a dictionary; what is not there is an error."""

    set = dict.__setitem__

    def get(self, key):
        return self[key].encode()

    def delete_key(self, key):
        del self[key]

    def add(self, key, amount):
        self[key] = self.setdefault(key, 0) + amount
        return self[key]


def at(time, kind="forward", schedule=None) -> Stamp:
    return Stamp(Fraction(time), None if schedule is None else Fraction(schedule), kind)


def test_a_message_is_waited_for_only_if_it_comes_later():
    clock = VirtualClock(latency=Fraction(1, 2))
    clock.work(Fraction(3))
    clock.receive(at(2))  # there since 2.5
    assert clock.loop.now == 3 and not clock.loop.idle
    clock.receive(at(4, "backward"))
    assert clock.loop.now == Fraction(9, 2)
    assert clock.loop.idle == {"backward_message": Fraction(3, 2)}
    assert clock.loop.now == clock.loop.compute + sum(clock.loop.idle.values())


def test_a_collective_sets_the_latest_time_of_its_group():
    clock = VirtualClock(latency=Fraction(7))
    clock.work(Fraction(1))
    clock.collective([at(1), at(5), at(2)], WORLD)
    assert clock.loop.now == 5 and clock.loop.idle == {WORLD: 4}


def test_the_schedule_alone_does_not_see_the_rest_of_the_loop():
    clock = VirtualClock()
    with clock.inside_schedule():
        clock.work(Fraction(3))
    clock.collective([at(9)], WORLD)
    clock.work(Fraction(1))
    clock.receive(at(12, schedule=12))
    assert (clock.loop.now, clock.schedule.now) == (12, 3)
    with clock.inside_schedule():
        clock.receive(at(13))  # sent from outside of the schedule
        assert (clock.loop.now, clock.schedule.now) == (13, 3)
        assert clock.stamp() == at(13, "other", 3)
        clock.receive(at(13, schedule=4))
    assert clock.schedule.idle == {"forward_message": 1}
    assert clock.stamp("forward") == at(13)


def test_stamps_survive_as_text():
    for stamp in (at(Fraction(1, 3), "backward", 2), at(0, "other")):
        assert Stamp.parse(str(stamp)) == stamp


def test_messages_are_found_in_the_order_of_posting():
    store = FakeStore()
    sender, receiver = Exchange(store, rank=0), Exchange(store, rank=1)
    keys = [receiver.message_key("g", 0, 0) for _ in range(2)]  # posted ahead
    for time in (5, 6):
        sender.post_message("g", 1, 0, at(time))
    sender.post_message("g", 1, 9, at(7))
    sender.post_message("h", 1, 0, at(8))
    assert [receiver.take_message(key).loop for key in reversed(keys)] == [6, 5]
    assert receiver.take_message(receiver.message_key("h", 0, 0)).loop == 8
    assert receiver.take_message(receiver.message_key("g", 0, 9)).loop == 7
    assert not store


def test_collectives_of_a_group_are_kept_apart_and_leave_no_keys():
    store = FakeStore()
    ranks = [Exchange(store, rank=rank) for rank in (3, 5)]
    keys = [[rank.enter("g", f"{name}{i}") for i, rank in enumerate(ranks)] for name in "ab"]
    for members, name in zip(keys, "ab"):
        for rank, key in zip(ranks, members):
            assert rank.members(key, [3, 5]) == [f"{name}0", f"{name}1"]
    assert not store


def test_costs():
    costs = Costs.parse(num_stages=2, forward="0.1", backward="1/3,2")
    assert costs.forward == (Fraction(1, 10),) * 2
    assert costs.backward == (Fraction(1, 3), 2) and costs.step == (0, 0)
    for text, words in (("1,2,3", "2 stages"), ("x", "not a number"), ("1,-1", "negative")):
        with pytest.raises(ValueError, match=words):
            per_stage(text, 2)


def outer():
    return call_site()


def test_the_call_site_names_file_function_and_line():
    site, callers = outer()
    assert site.startswith("tests/unit/test_virtual_clock.py:outer:")
    assert callers[0].startswith(
        "tests/unit/test_virtual_clock.py:test_the_call_site_names_file_function_and_line:"
    )


def one_iteration(stage: int) -> dict:
    clock = VirtualClock()
    clock.work(Fraction(100))
    clock.end_iteration()
    clock.work(Fraction(3))
    clock.collectives[WORLD] += 2
    clock.collectives[WORLD._replace(stages=(0,))] += 5
    clock.collective([at(104)], WORLD)
    clock.end_iteration()
    clock.work(Fraction(100))
    return stage_result(*clock.iterations[1:], stage=stage, iterations=1)


def test_results_cover_the_measured_iterations_only():
    result = one_iteration(0)
    assert result["utilization"] == 0.75 and result["elapsed"] == 4
    assert result["idle"]["collective"] == 1 and result["cross_stage_collectives"] == 2
    [entry] = result["call_sites"]
    assert entry["per_iteration"] == 2 and entry["idle"] == 1 and entry["site"] == "a.py:f:1"


def test_results_of_ranks_are_listed_by_stage():
    first, second = one_iteration(0), one_iteration(1)
    second["utilization"] = 0.5
    job = job_result([second, first])
    assert job["utilization"] == [0.75, 0.5]
    assert job["cross_stage_collectives"] == 2
    [entry] = json.loads(json.dumps(job["call_sites"]))
    assert entry["idle"] == [1, 1] and entry["stages"] == [0, 1]


def test_the_pipeline_fills_before_measuring():
    run = VirtualRun(stages=8, microbatches=1, schedule="paci")
    assert run.warmup_iterations == 9
    assert VirtualRun(stages=2, microbatches=4, schedule="paci").warmup_iterations == 3


def test_every_rank_of_a_stage_is_a_process():
    run = VirtualRun(stages=4, microbatches=4, schedule="paci", replicas=3, tensor=2)
    assert run.num_ranks == 24
    more = VirtualRun(stages=4, microbatches=1, schedule="paci", extra_in_flight=2)
    arguments = more.arguments(Path("x"))
    assert arguments[arguments.index("--paci-extra-in-flight") + 1] == "2"
    assert more.warmup_iterations == 4 + 2 * 3 + 1  # so many are in flight on the first stage
    arguments = run.arguments(Path("x"))
    assert arguments[arguments.index("--tensor-model-parallel-size") + 1] == "2"
    assert arguments[arguments.index("--global-batch-size") + 1] == "12"
    with pytest.raises(ValueError, match="same number of ranks"):
        measure([run, VirtualRun(stages=4, microbatches=4, schedule="paci")])


REFUSED = {
    "--stages 0": "of 1 or more",
    "--replicas 0": "give 1 or more",
    "--tensor 0": "give 1 or more",
    "--microbatches 0": "of 1 or more",
    "--schedule gpipe": "take one of",
    "--schedule paci --accum 3": "does not divide",
    "--schedule paci --accum 0": "does not divide",
    "--accum 2": "take --schedule paci",
    "--schedule paci --extra-in-flight -1": "give 0 or more",
    "--extra-in-flight 1": "take --schedule paci",
    "--schedule interleaved --stages 1": "more than one stage",
    "--schedule interleaved --microbatches 3": "a multiple of 2",
    "--schedule interleaved --chunks 1": "2 or more",
    "--latency -1": "0 or more",
    "--forward-time 1,2,3": "one each",
    "--step-time x": "not a number",
    "--iterations 0": "1 or more",
    "--warmup -1": "0 or more",
    "--timeout 0": "more than 0",
    "--megatron-args ' --x": "quotes",
    "--json /no/such/folder/x.json": "create it",
    "--json /": "is a folder",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_bad_input_is_refused_before_anything_starts(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        virtual_command, "measure_runs", lambda *args, **kwargs: pytest.fail("started")
    )
    line = ["--stages", "2", "--microbatches", "4", "--schedule", "1f1b"]
    line += ["--json", str(tmp_path / "x.json")]
    given = ["--megatron-args", "' --x"] if "quotes" in REFUSED[flags] else flags.split()
    assert main(["bench", "virtual", *line, *given]) == 2
    error = capsys.readouterr().err
    assert REFUSED[flags] in error and given[-2] in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_command_writes_a_table_and_a_file(tmp_path, capsys, monkeypatch):
    result = job_result([one_iteration(0), one_iteration(1)])
    monkeypatch.setattr(virtual_command, "measure_runs", lambda runs, **kwargs: [result])
    path = tmp_path / "x.json"
    line = f"bench virtual --stages 2 --microbatches 4 --schedule paci --accum 2 --json {path}"
    assert main(line.split()) == 0
    record = json.loads(path.read_text())
    assert record["utilization"] == [0.75, 0.75] and record["cross_stage_collectives"] == 2
    assert record["parameters"]["accum"] == 2 and record["parameters"]["warmup"] == 3
    assert record["command"][-1] == str(path) and "torch" in record["versions"]
    printed = capsys.readouterr().out
    assert "0.7500" in printed and "a.py:f:1 <- b.py:g:2" in printed


def test_a_failed_rank_and_an_interrupt_end_the_command(tmp_path, capsys, monkeypatch):
    line = f"bench virtual --stages 2 --microbatches 4 --schedule 1f1b --json {tmp_path / 'x'}"
    for error, status in ((RankError("the end of a log"), 1), (KeyboardInterrupt(), 130)):
        def fail(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(virtual_command, "measure_runs", fail)
        assert main(line.split()) == status
        assert str(error) in capsys.readouterr().err


def test_help_imports_neither_torch_nor_megatron():
    code = (
        "import sys; from megatron_paci.__main__ import main\n"
        "try: main(['bench', 'virtual', '--help'])\n"
        "finally: assert not {'torch', 'megatron'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "--microbatches" in result.stdout
