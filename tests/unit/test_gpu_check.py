"""The plan and the report of the GPU check (tests/gpu); what it runs needs a GPU."""

from __future__ import annotations

import pytest

from tests.gpu.plan import ENVIRONMENTS, LARGE, make_plan
from tests.gpu.results import Row, first_difference, markdown, rows_of

OPTIONS = {"paci_extra_in_flight", "paci_defer_step"}


def result(**changes):
    """Return what a rank reports."""
    return {
        "losses": [{"lm loss": 5.5}, {"lm loss": 5.25}], "evaluations": [], "weights": "aa",
        "optimizer": "bb", "ends": [0.0, 1.0, 2.0, 3.0, 4.0, 9.0], "tokens": 100,
        "parameters": 1000, "peak": 5000, "statistics": {"drift_max": 0, "drift_bound": 1},
    } | changes


def outcomes_of(plan, **of_all):
    """Return outcomes of a plan in which every scenario has two equal ranks."""
    return {
        each.name: {"skipped": each.skip, "seconds": 0.0} if each.skip
        else {"ranks": [result(**of_all), result(**of_all)], "seconds": 1.5}
        for each in plan.scenarios
    }


def row(name, plan, outcomes, *, device="cuda", num_gpus=1):
    [found] = [each for each in rows_of(plan.checks, outcomes, device=device, num_gpus=num_gpus)
               if each.name == name]
    return found


@pytest.mark.parametrize("device, num_gpus", [("cpu", 0), ("cuda", 1), ("cuda", 2), ("cuda", 8)])
def test_a_plan_is_consistent(device, num_gpus):
    plan = make_plan(device, num_gpus, OPTIONS)
    names = [each.name for each in plan.scenarios]
    assert len(set(names)) == len(names)
    assert len({each.name for each in plan.checks}) == len(plan.checks)
    assert {name for each in plan.checks for name in (each.left, each.right)} == {
        name for name in names if not name.endswith(" works")
    }
    order = [list(ENVIRONMENTS).index(each.environment) for each in plan.scenarios]
    assert order == sorted(order)
    for each in plan.scenarios:
        assert each.environment.startswith(each.backend)
        if each.arguments:
            command = " ".join(each.arguments)
            assert f"--pipeline-model-parallel-size {each.ranks} " in command
            assert f"--distributed-backend {each.backend} " in command
            assert ("--pipeline-schedule paci" in command) == each.hooked


def test_a_backend_is_tried_before_it_is_used():
    names = [each.name for each in make_plan("cuda", 1, OPTIONS).scenarios]
    for ranks in (2, 4):
        users = [n for n, name in enumerate(names) if name.startswith(f"nccl{ranks} bf16")]
        assert users and names.index(f"nccl{ranks} works") < min(users)


def test_without_a_gpu_what_needs_one_is_skipped():
    plan = make_plan("cpu", 0, OPTIONS)
    for each in plan.scenarios:
        needs_one = each.backend == "nccl" or "CUDA_" in each.name
        assert each.skip == ("needs CUDA" if needs_one else "")
        assert LARGE not in " ".join(each.arguments)
    rows = rows_of(plan.checks, outcomes_of(plan), device="cpu", num_gpus=0)
    assert {each.detail for each in rows if each.outcome == "skipped"} == {"needs CUDA"}
    assert [each.name for each in rows if "memory" in each.name and each.outcome != "skipped"] == []


def test_options_that_this_version_lacks_are_skipped():
    plan = make_plan("cuda", 1, {"paci_defer_step"})
    skipped = {each.name: each.skip for each in plan.scenarios if each.skip}
    assert set(skipped.values()) == {"this version has no --paci-extra-in-flight"}
    assert all("extra-in-flight" in name for name in skipped) and len(skipped) == 3


def test_speed_is_measured_over_nccl_where_every_rank_has_a_gpu():
    for num_gpus, backends in ((1, "gloo2 gloo4"), (2, "nccl2 gloo4"), (4, "nccl2 nccl4")):
        names = [each.name for each in make_plan("cuda", num_gpus, OPTIONS).checks]
        assert [name.split()[0] for name in names if name.endswith("large: speed")] == (
            backends.split()
        )


def test_equal_runs_pass_and_a_difference_fails_with_its_place():
    plan = make_plan("cuda", 1, OPTIONS)
    name, left, right = "gloo2 fp32: drained equals 1F1B", "gloo2 fp32 1f1b", "gloo2 fp32 drained"
    outcomes = outcomes_of(plan)
    assert row(name, plan, outcomes) == Row(name, "passed")
    outcomes[right] = {"ranks": [result(), result(weights="ac")]}
    assert row(name, plan, outcomes) == Row(name, "failed", "rank 1: weights")
    outcomes[right] = {"failed": "a rank failed; exit statuses [1, None]\nlast words"}
    assert row(name, plan, outcomes) == Row(name, "failed", f"{right} failed")
    del outcomes[left], outcomes[right]
    assert row(name, plan, outcomes).outcome == "failed"


@pytest.mark.parametrize("drifts, losses, outcome", [
    ([1, 0], [5.5, 5.1], "passed"),
    ([1, 0], [5.5, 5.25], "failed"),
    ([0, 0], [5.5, 5.1], "failed"),
    ([2, 0], [5.5, 5.1], "failed"),
])
def test_a_stream_has_the_drift_of_its_schedule_and_other_losses(drifts, losses, outcome):
    plan = make_plan("cuda", 1, OPTIONS)
    outcomes = outcomes_of(plan)
    ranks = [
        result(statistics={"drift_max": drift, "drift_bound": bound},
               losses=[{"lm loss": loss} for loss in losses])
        for drift, bound in zip(drifts, (1, 0))
    ]
    outcomes["gloo2 bf16 stream"] = {"ranks": ranks}
    name = "gloo2 bf16: undrained is delayed"
    assert row(name, plan, outcomes).outcome == outcome
    outcomes["gloo2 bf16 drained"] = {"ranks": ranks}
    assert row(name, plan, outcomes).outcome == "failed"


@pytest.mark.parametrize("changes, place", [
    ({"losses": [{"lm loss": 5.5}, {"lm loss": 5.26}]}, "rank 0: losses[1]"),
    ({"losses": [{"lm loss": 5.5}]}, "rank 0: losses[length]"),
    ({"optimizer": "bc"}, "rank 0: optimizer"),
    ({"ends": [7.0], "peak": 1}, ""),
])
def test_the_first_difference(changes, place):
    assert first_difference([result()], [result(**changes)]) == place


def test_memory_fails_from_a_copy_of_the_weights_on():
    plan = make_plan("cuda", 1, OPTIONS)
    name, paci = "gloo2 large: memory", "gloo2 large paci"
    outcomes = outcomes_of(plan)
    outcomes[paci] = {"ranks": [result(peak=5500), result(peak=5999)]}
    found = row(name, plan, outcomes)
    assert found == Row(name, "passed", "peak over that of 1F1B by stage: 1.100, 1.200")
    outcomes[paci] = {"ranks": [result(), result(peak=6000)]}
    found = row(name, plan, outcomes)
    assert found.outcome == "failed" and "weights on 1" in found.detail


def test_speed_leaves_out_the_first_iterations_and_the_drain_and_says_when_gpus_are_shared():
    plan = make_plan("cuda", 1, OPTIONS)
    outcomes = outcomes_of(plan)
    ends = [0.0, 1.0, 2.0, 2.5, 3.0, 9.0]
    outcomes["gloo2 large paci"] = {"ranks": [result(), result(ends=ends)]}
    found = row("gloo2 large: speed", plan, outcomes)
    assert found.outcome == "measured"
    assert found.detail.startswith("200 tokens/s, 1F1B 100: ratio 2.00, 1.25 where every stage")
    assert "share" in found.detail
    plan = make_plan("cuda", 2, OPTIONS)
    assert "share" not in row("nccl2 large: speed", plan, outcomes_of(plan), num_gpus=2).detail


def test_a_refused_backend_is_no_failure_and_the_report_shows_failures_in_full():
    plan = make_plan("cuda", 1, OPTIONS)
    outcomes = outcomes_of(plan)
    outcomes["nccl2 works"] = {"refused": "two ranks | one GPU", "seconds": 2.0}
    outcomes["gloo2 bf16 stream"] = {"failed": "no end after 60 s\nrank 1 waits", "seconds": 60.0}
    rows = rows_of(plan.checks, outcomes, device="cuda", num_gpus=1)
    assert Row("nccl2 works", "skipped", "two ranks | one GPU") in rows
    text = markdown(rows, {"device": "GPU"}, outcomes)
    assert "| nccl2 works | skipped | two ranks \\| one GPU |" in text
    assert "| gloo2 bf16 stream | failed | no end after 60 s |" in text
    assert "| gloo2 bf16 stream | 60.0 |" in text
    assert "```\nno end after 60 s\nrank 1 waits\n```" in text
