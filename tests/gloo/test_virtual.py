"""Virtual time on real training: formulas that hold exactly, and what must not go unseen.

For forward 1, backward 2, step 0, latency 0 a pipeline of N stages is busy, with m microbatches,
m / (m + N - 1) of the time under 1F1B and m v / (m v + N - 1) with v chunks per stage. Under PACI
it is always busy, as long as nobody synchronizes it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from megatron_paci.bench.costs import per_stage
from megatron_paci.bench.emulated import EmulatedRun, add_ratios, schedule_result
from megatron_paci.bench.ranks import RankError
from megatron_paci.bench.theory import SCHEDULES
from megatron_paci.bench.virtual import VirtualRun, measure
from megatron_paci.simulate.figures import Memory
from megatron_paci.simulate.figures import measure as simulated
from megatron_paci.simulate.schedules import plan
from megatron_paci.simulate.timing import Costs
from tests.gloo.launch import launch, measured

ROOT = Path(__file__).resolve().parents[2]

# A launch script in which a function of the module or class {owner} was changed.
CHANGED = """
import runpy
import torch
from {module} import {owner} as owner

original = owner.{name}

def leftover(*args, **kwargs):
    {change}

owner.{name} = leftover
try:
    runpy.run_path({script!r}, run_name="__main__")
finally:
    owner.{name} = original
"""

# Stage 2 takes 100 units more for one pass or step among those that are measured.
STALL = (
    "import os; leftover.calls = getattr(leftover, 'calls', 0) + 1; "
    "late = os.environ['RANK'] == '2' and leftover.calls == 30; "
)
STALLS = {"stall": STALL + "return original(args[0], args[1] + 100 * late)"}


def run(stages: int, microbatches: int, schedule: str, **parameters) -> VirtualRun:
    return VirtualRun(
        stages=stages, microbatches=microbatches, schedule=schedule,
        **{"iterations": 2, "warmup": 2} | parameters,
    )


def paci(stages: int, microbatches: int, accum: int, **parameters) -> VirtualRun:
    return run(stages, microbatches, "paci", accum=accum, warmup=None, **parameters)


def changed(path: Path, change: str, module: str, owner: str, name: str) -> str:
    """Write a launch script in which a function does ``change``; return its path."""
    script = str(ROOT / "megatron_paci/bench/tiny_gpt.py")
    path.write_text(
        CHANGED.format(change=change, module=module, owner=owner, name=name, script=script)
    )
    return str(path)


def runs(stages: int, folder: Path) -> dict[str, VirtualRun]:
    """Return what is trained with a number of stages, in one launch."""
    both = {f"1f1b-m{m}": run(stages, m, "1f1b") for m in (1, 2, 4, 8)}
    both |= {
        f"interleaved-m{m}": run(stages, m, "interleaved") for m in (2, 4) if m % stages == 0
    }
    both["paci-latency"] = paci(stages, 4, 2, latency="1/2")
    # One microbatch more per link hides half of the 3 units that one takes.
    both["paci-s1"] = paci(stages, 4, 2, latency="3/2", extra_in_flight=1)
    if stages == 4:
        both |= {"paci-a4": paci(4, 4, 4), "paci-m2": paci(4, 2, 1)}
        for name, change in STALLS.items():
            script = changed(
                folder / f"{name}.py", change, "megatron_paci.bench.clock", "VirtualClock", "work"
            )
            both[name] = paci(4, 4, 4, iterations=6, script=script)
        return both
    barrier = "torch.distributed.barrier(); return original(*args, **kwargs)"
    for name, target in {
        "in-loop": ("megatron.training", "training", "training_log"),
        "in-schedule": ("megatron_paci.build", "MegatronStage", "run"),
    }.items():
        script = changed(folder / f"{name}.py", barrier, *target)
        both[name] = paci(2, 4, 4, script=script)
    return both | {
        "interleaved-v3": run(2, 2, "interleaved", chunks=3),
        "uneven": run(2, 1, "1f1b", forward_time="1,2", backward_time="2,4"),
        "step": run(2, 4, "1f1b", step_time="1/2"),
        "latency": run(2, 1, "1f1b", latency="1/2"),
        "tied": run(2, 4, "1f1b", tied_embeddings=True),
        "paci-a1": paci(2, 4, 1),
        "paci-a4": paci(2, 4, 4),
        "paci-tied": paci(2, 4, 2, tied_embeddings=True),
        "paci-step": paci(2, 4, 2, step_time="1/2"),
        "paci-deferred": paci(2, 4, 2, step_time="1/2", megatron_args="--paci-defer-step"),
        "paci-s1-slow": run(2, 3, "paci", warmup=8, latency="4", extra_in_flight=1),
    }


def emulated(schedule: str) -> EmulatedRun:
    return EmulatedRun(
        stages=2, microbatches=2, schedule=schedule, iterations=2, warmup=2,
        forward=(0.004, 0.006), backward=(0.008, 0.008), step=(0.002, 0.002),
    )


def trained(stages: int, folder: Path, seconds: float) -> dict[str, dict]:
    """Train ``runs``, with two stages also on emulated devices; return the results by name."""
    results = measured(runs(stages, folder), folder, seconds=seconds)
    if stages == 2:
        devices = {name: emulated(name) for name in SCHEDULES}
        plans = {name: run.for_ranks(folder / name) for name, run in devices.items()}
        ranks = launch(stages, plans, folder, seconds=seconds)
        for name, run in devices.items():
            results[name] = run.figures(folder / name) | {"ranks": ranks[name]}
    return results


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return trained(2, tmp_path_factory.mktemp("two"), 400)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return trained(4, tmp_path_factory.mktemp("four"), 400)


@pytest.fixture(params=[2, 4])
def pipeline(request):
    """The number of stages and the results in virtual time with that many."""
    results = request.getfixturevalue({2: "two", 4: "four"}[request.param])
    return request.param, {name: results[name] for name in results if name not in SCHEDULES}


@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_1f1b_is_busy_as_the_formula_says(pipeline, m):
    stages, results = pipeline
    result = results[f"1f1b-m{m}"]
    assert result["schedule_utilization"] == [m / (m + stages - 1)] * stages
    assert result["utilization"] == [m / (m + stages - 1)] * stages
    assert result["compute"] == [2 * 3 * m] * stages


def test_interleaved_is_busy_as_the_formula_says(two, four):
    for stages, m, v, result in (
        (2, 2, 2, two["interleaved-m2"]),
        (2, 4, 2, two["interleaved-m4"]),
        (2, 2, 3, two["interleaved-v3"]),
        (4, 4, 2, four["interleaved-m4"]),
    ):
        assert result["schedule_utilization"] == [m * v / (m * v + stages - 1)] * stages
        assert result["utilization"] == [m * v / (m * v + stages - 1)] * stages


def simulation(planned: VirtualRun) -> tuple[list[float], Fraction]:
    """Return what the simulator makes of a run: utilization per stage, time of an iteration."""
    n, zero = planned.stages, [0] * planned.stages
    forward, backward, step = (
        per_stage(text, n)
        for text in (planned.forward_time, planned.backward_time, planned.step_time)
    )
    figures = simulated(
        lambda count: plan(
            planned.schedule, n, planned.microbatches, iterations=count,
            accumulation=planned.accum, chunks=planned.chunks,
            extra_in_flight=planned.extra_in_flight,
            defer_step="--paci-defer-step" in planned.megatron_args,
        ),
        Costs(forward, backward, zero, step, Fraction(planned.latency)),
        Memory.in_microbatches(n),
    )
    return [float(share) for share in figures.utilization], figures.iteration_time


def test_the_real_schedules_take_the_time_that_the_simulator_says(pipeline, tmp_path):
    """Whatever is trained here without a fault on purpose: 1F1B, interleaved and PACI."""
    stages, results = pipeline
    planned = {
        name: run for name, run in runs(stages, tmp_path).items()
        if name not in ("stall", "in-loop", "in-schedule")
    }
    assert len(planned) == {2: 19, 4: 9}[stages]
    for name, run in planned.items():
        utilization, time = simulation(run)
        assert results[name]["utilization"] == utilization, name
        assert results[name]["elapsed"] == [float(run.iterations * time)] * stages, name


def test_other_costs_by_hand(two):
    # One microbatch: forwards of 1 and 2, then backwards of 4 and 2.
    assert two["uneven"]["utilization"] == [3 / 9, 6 / 9]
    # The step comes on top of both times, outside of the schedule function.
    assert two["step"]["utilization"] == [12.5 / 15.5] * 2
    assert two["step"]["schedule_utilization"] == [12 / 15] * 2
    # Two messages lie between the first forward and the last backward.
    assert two["latency"]["utilization"] == [3 / 7] * 2


def test_paci_is_always_busy_and_never_reduces_over_stages(two, four):
    for result in (*(two[f"paci-{name}"] for name in ("a1", "a4", "step", "tied", "deferred")),
                   *(four[f"paci-{name}"] for name in ("a4", "m2"))):
        assert result["call_sites"] == [] and result["cross_stage_collectives"] == 0
        assert set(result["schedule_utilization"]) == set(result["utilization"]) == {1}


def test_paci_waits_for_messages_that_travel_long(pipeline):
    """A stage gets N microbatches done in the time of a round trip over N - 1 links."""
    stages, results = pipeline
    expected = float(Fraction(3 * stages, 3 * stages + stages - 1))  # 2 latencies of 1/2 each
    assert results["paci-latency"]["schedule_utilization"][0] == pytest.approx(expected)


def test_more_microbatches_in_flight_hide_latency(pipeline):
    stages, results = pipeline
    assert results["paci-s1"]["utilization"] == [1] * stages
    if stages == 2:  # three microbatches of 3 units in the time of two and of two messages of 4
        assert results["paci-s1-slow"]["utilization"] == [9 / 14] * 2


def test_time_is_computing_and_waiting(pipeline):
    for result in pipeline[1].values():
        loop = zip(result["elapsed"], result["compute"], result["idle"])
        alone = [entry.values() for entry in result["schedule"]]
        for elapsed, compute, idle in (*loop, *alone):
            assert elapsed == pytest.approx(compute + sum(idle.values()))


def planted(result: dict, name: str) -> list[dict]:
    return [
        entry for entry in result["call_sites"] if entry["site"].endswith(f"{name}.py:leftover:9")
    ]


def test_a_barrier_left_in_the_loop_is_found_and_costs_utilization(two):
    result = two["in-loop"]
    [entry] = planted(result, "in-loop")
    assert entry["call"] == "barrier" and entry["stages"] == [0, 1] and entry["per_iteration"] == 1
    assert "megatron/training/training.py:train:" in entry["callers"][0]
    # The first stage runs one forward ahead, and has to wait as long.
    assert result["utilization"] == [12 / 13] * 2
    assert result["schedule_utilization"] == [1, 1]
    assert not planted(two["paci-a4"], "in-loop")


def test_a_barrier_left_in_the_schedule_costs_both_utilizations(two):
    result = two["in-schedule"]
    [entry] = planted(result, "in-schedule")
    assert entry["per_iteration"] == 1
    assert "forward_backward.py:forward_backward_pipelining_paci:" in entry["callers"][0]
    assert result["schedule_utilization"] == result["utilization"] == [12 / 13] * 2


def test_stock_training_reduces_over_stages_where_it_is_known_to(two):
    def sites(name):
        return {entry["site"].rsplit(":", 1)[0] for entry in two[name]["call_sites"]}

    common = {
        "megatron/core/rerun_state_machine.py:_reduce_any",
        "megatron/core/optimizer/clip_grads.py:get_grad_norm_fp32",
        "megatron/core/timers.py:start",
        "megatron/core/timers.py:stop",
    }
    assert common <= sites("1f1b-m4")
    tied = sites("tied") - sites("1f1b-m4")
    assert tied == {
        "megatron/core/distributed/finalize_model_grads.py:_allreduce_embedding_grad"
    }


def test_idle_time_has_its_cause(two):
    for name in ("1f1b-m4", "interleaved-m4"):
        first, last = two[name]["idle"]
        assert first["backward_message"] > 0 == first["forward_message"]
        assert last["forward_message"] > 0 == last["backward_message"]
        assert first["other_message"] == last["other_message"] == 0


def test_a_stage_that_stalls_once_delays_nobody_at_a_collective(four):
    """The others wait as long as they must, for its messages, and are busy again afterwards."""
    result = four["stall"]
    assert result["call_sites"] == []
    assert result["compute"] == [72, 72, 172, 72]  # 6 iterations of 4 microbatches of 1 + 2
    assert [sum(idle.values()) for idle in result["idle"]] == [100, 100, 0, 100]
    assert all(idle["collective"] == idle["other_message"] == 0 for idle in result["idle"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pass_and_step_lasts_on_an_emulated_device(two, schedule):
    result = two[schedule]
    chunks = 2 if schedule == "interleaved" else 1
    trained = 2 + 2 + 2  # warm-up, measured, and last iterations
    for rank in result["ranks"]:
        assert len(rank["late"]) == trained * (2 * 2 * chunks + 1)
    assert len(result["costs"]) == len(result["seconds_by_cause"]) == 2
    for spent in result["seconds_by_cause"]:
        assert spent["F"] > 0 < spent["B"] and spent["step"] > 0


def test_what_emulated_devices_tell_fits_together(two):
    devices = {name: emulated(name) for name in SCHEDULES}
    measured = {name: [two[name]] for name in SCHEDULES}
    results = {name: schedule_result(devices[name], measured[name]) for name in SCHEDULES}
    add_ratios(devices, measured, results)
    for name, result in results.items():
        assert result["throughput"] == pytest.approx(2 / two[name]["seconds_per_iteration"])
        assert result["utilization"] == max(result["utilization_by_stage"]) == (
            result["utilization_by_stage"][1]
        )
        ratio = result["throughput"] / results["1f1b"]["throughput"]
        assert result["ratio"] == pytest.approx(ratio)


def test_a_run_that_cannot_start_shows_why(tmp_path):
    with pytest.raises(RankError, match="unrecognized arguments: --no-such-flag"):
        measure([paci(1, 2, 2, megatron_args="--no-such-flag")], folder=tmp_path, seconds=200)


def test_the_command(tmp_path):
    path = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "megatron_paci", "bench", "virtual", "--stages", "1",
         "--microbatches", "2", "--schedule", "paci", "--accum", "1", "--iterations", "2",
         "--step-time", "1", "--timeout", "200", "--json", str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=250,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert record["utilization"] == record["schedule_utilization"] == [1]
    assert record["compute"] == [2 * (2 * 3 + 2)]  # two iterations of two passes and two steps
    assert record["cross_stage_collectives"] == 0 and record["call_sites"] == []
    assert "1.0000" in done.stdout
