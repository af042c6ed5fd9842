"""megatron_paci/compare: the verdict, and the figures of traces and of the simulator behind it."""

from __future__ import annotations

import pytest

from megatron_paci.compare.predict import predicted_seconds
from megatron_paci.compare.traces import timeline_panel, trace_figures
from megatron_paci.compare.verdict import loss_at, verdict
from megatron_paci.simulate.orders import Work
from megatron_paci.trace_file import TraceError
from tests.unit.compared import figures, write_traces


def long_run(schedule, *, seconds, losses, **more):
    """A run of 200 iterations that takes so many seconds, and whose loss falls to ``losses``."""
    ends = [seconds * (i + 1) / 200 for i in range(200)]
    values = [losses(i) for i in range(200)]
    return figures(schedule, schedule, losses=values, ends=ends) | more


def falling(i):
    return 9.0 - i / 50


def test_the_same_loss_faster_suits():
    found = verdict({
        "1f1b": long_run("1f1b", seconds=100, losses=falling),
        "paci": long_run("paci", seconds=80, losses=lambda i: falling(i) + 0.01 * (-1) ** i),
    })
    assert found["headline"].startswith("paci suits this model as far as one seed tells: 1.25 ")
    [compared] = found["compared"].values()
    assert compared["loss_difference"] == pytest.approx(0, abs=1e-9)
    # 20 iterations, +0.01 and -0.01 in turn: standard deviation 0.01 * sqrt(20 / 19).
    assert compared["noise"] == pytest.approx(2 * 0.01 / 19**0.5)
    assert any("One seed" in text for text in found["facts"])


def test_a_loss_behind_at_equal_samples_is_told_with_the_one_at_equal_time():
    base = long_run("1f1b", seconds=100, losses=falling)
    ahead = verdict({"1f1b": base, "paci": long_run(
        "paci", seconds=80, losses=lambda i: falling(i) + 0.1)})
    assert "worth a longer trial" in ahead["headline"] and "0.100 higher" in ahead["headline"]
    # After 80 s 1F1B has done 160 iterations: 40 of 1/50 behind, less 0.1.
    assert "0.700 lower" in ahead["headline"]
    behind = verdict({"1f1b": base, "paci": long_run(
        "paci", seconds=80, losses=lambda i: falling(i) + 2)})
    assert "does not pay here" in behind["headline"] and "even at equal time" in behind["headline"]
    assert any("lower learning rate" in text for text in behind["next"])


def test_what_is_not_faster_does_not_pay_and_the_fastest_of_megatrons_own_is_the_measure():
    runs = {
        "1f1b": long_run("1f1b", seconds=100, losses=falling),
        "interleaved": long_run("interleaved", seconds=90, losses=falling),
        "paci": long_run("paci", seconds=89, losses=falling),
    }
    assert verdict(runs)["headline"] == (
        "paci does not pay here: 1.01 times the throughput of interleaved.")
    assert "1f1b, throughput over interleaved: 0.90 measured." in verdict(runs)["facts"]
    runs["interleaved"]["predicted_seconds"], runs["paci"]["predicted_seconds"] = 1.0, 0.8
    assert "although its schedule allows 1.25" in verdict(runs)["headline"]


def test_more_than_the_schedules_explain_is_called_noise():
    found = verdict({
        "1f1b": long_run("1f1b", seconds=150, losses=falling, predicted_seconds=1.0),
        "paci": long_run("paci", seconds=80, losses=lambda i: falling(i) + 0.1,
                         predicted_seconds=0.8),
    })
    # By that clock 1F1B has done 160 iterations when PACI has done 200; 106 by the other.
    assert "at equal simulated time its loss is 0.700 lower" in found["headline"]
    assert "the schedules explain 1.25; the rest is not theirs" in found["headline"]
    assert any("Measure again" in text for text in found["next"])


def test_no_verdict_without_runs_to_compare_nor_on_quality_after_a_few_iterations():
    one = {"1f1b": figures("1f1b")}
    assert "no run under PACI" in verdict(one)["headline"]
    assert "no run under Megatron's" in verdict({"paci": figures()})["headline"]
    short = verdict(one | {"paci": figures(ends=(1.0, 2.0, 3.0, 3.4, 3.8))})
    assert short["headline"] == ("No verdict: 5 iterations are too few for one. So far paci has "
                                 "1.25 times the throughput of 1f1b.")


def test_a_loss_that_is_no_number_any_more_is_said():
    nan = float("nan")
    found = verdict({"1f1b": long_run("1f1b", seconds=100, losses=falling), "paci": long_run(
        "paci", seconds=80, losses=lambda i: nan if i > 150 else falling(i))})
    assert "does not suit" in found["headline"] and "not a number" in found["headline"]


def test_a_busy_machine_is_named():
    runs = {"1f1b": long_run("1f1b", seconds=100, losses=falling, cores=2, load_before=3.0),
            "paci": long_run("paci", seconds=80, losses=falling, cores=2, load_before=2.5)}
    assert not any("busy" in text for text in verdict(runs)["facts"])
    runs["paci"]["load_before"] = 3.5
    assert any("load average 3.5 when paci began" in text for text in verdict(runs)["facts"])


def test_the_loss_at_a_time_is_that_of_the_last_iterations_that_had_ended():
    run = figures()
    assert loss_at(run, 3.4) == 7.0 and loss_at(run, 0.5) is None


def test_costs_and_utilization_of_a_trace(tmp_path):
    write_traces(tmp_path, "1f1b")
    found = trace_figures(tmp_path, skip=3)
    assert found["costs"] == [{"forward": 1.0, "backward": 2.0, "step": 0.5}] * 2
    # 4 microbatches: 12 s of passes and 0.5 of the update in (4 + 1) * 3 + 0.5.
    assert found["utilization"] == pytest.approx([12.5 / 15.5] * 2)
    assert sum(found["seconds_by_cause"][0].values()) == pytest.approx(2 * 15.5)
    with pytest.raises(TraceError, match="before iteration 6"):
        trace_figures(tmp_path, skip=5)
    some = trace_figures(tmp_path, skip=1, iterations=2)
    assert sum(some["seconds_by_cause"][1].values()) == pytest.approx(2 * 15.5)
    assert some["costs"] == found["costs"]
    with pytest.raises(TraceError, match="before iteration 6"):
        trace_figures(tmp_path, skip=1, iterations=5)


def test_the_simulation_is_the_closed_form(tmp_path):
    costs = [{"forward": 1.0, "backward": 2.0, "step": 0.0}] * 4
    run = {"num_stages": 4, "num_microbatches": 8, "accumulation": 8, "chunks": 2,
           "extra_in_flight": 1, "defer_step": True}
    seconds = {name: predicted_seconds(run | {"schedule": name}, costs)
               for name in ("1f1b", "interleaved", "paci")}
    assert seconds == {"1f1b": 3 * (8 + 3), "interleaved": 1.5 * (16 + 3), "paci": 3 * 8}
    unequal = run | {"schedule": "interleaved", "num_microbatches": 6}
    assert predicted_seconds(unequal, costs) is None


def test_chunks_of_a_stage_add_up(tmp_path):
    write_traces(tmp_path, "interleaved")
    assert {span.chunk for span in _passes(tmp_path)} == {0, 1}
    assert trace_figures(tmp_path, skip=1)["costs"][0]["forward"] == 1.0


def _passes(folder):
    panel = timeline_panel(folder, title="x", num_microbatches=4)
    assert panel.title == "x, iterations 1 to 4" and panel.num_microbatches == 4
    return [event.task for event in panel.events if event.task.work is not Work.STEP]
