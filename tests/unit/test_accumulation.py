"""Phases of ``--paci-accum-schedule``: how they are read, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_paci.accumulation import SYNC, accumulation_at, parse_phases, value_at
from megatron_paci.compatibility import check, violations
from megatron_paci.windows import shortest_window, windows
from tests.unit.test_compatibility import BASE, PACI, parse  # noqa: F401


def test_phases_are_read():
    assert parse_phases("sync:0,4:20000,8:100000") == {0: SYNC, 20000: 4, 100000: 8}
    assert parse_phases("4") == {0: 4} and parse_phases("sync") == {0: SYNC}
    assert parse_phases("4:0, sync:16") == {0: 4, 16: SYNC}


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "'' is not an accumulation"),
        ("sync:0,", "'' is not an accumulation"),
        ("0:0", "'0:0' is not an accumulation"),
        ("-4", "'-4' is not an accumulation"),
        ("flush:0", "'flush:0' is not an accumulation"),
        ("4:0,8:1e5", "'8:1e5' is not an accumulation"),
        ("4:0;8:100", "'4:0;8:100' is not an accumulation"),
        ("sync:16,4:32", "nothing holds from sample 0 on"),
        ("sync:0,4:32,8:32", "'8:32' does not begin after the part before it"),
        ("sync:0,4:32,8:16", "'8:16' does not begin after the part before it"),
        ("sync:0,4", "'4' does not begin after the part before it"),
    ],
)
def test_what_are_no_phases_is_refused(parse, text, reason):  # noqa: F811
    with pytest.raises(ValueError, match=f"^{reason}"):
        parse_phases(text)
    args = parse(PACI)
    args.paci_accum_schedule = text
    [line] = violations(args)
    assert reason in line and "Remedy: write accumulations and samples like sync:0,4:" in line


def test_a_phase_begins_with_the_first_iteration_that_begins_in_it():
    phases = parse_phases("sync:0,4:20,8:33")
    found = [value_at(phases, sample) for sample in (0, 16, 20, 32, 33, 10**9)]
    assert found == [SYNC, SYNC, 4, 4, 8, 8]


def test_the_schedule_stands_for_the_accumulation():
    args = SimpleNamespace(paci_accum=None, paci_accum_schedule=None)
    assert accumulation_at(args, 0, 16) == 16
    args.paci_accum = 4
    assert accumulation_at(args, 0, 16) == 4
    args.paci_accum_schedule = "sync:0,2:16"
    assert [accumulation_at(args, sample, 16) for sample in (0, 16)] == [SYNC, 2]


def test_windows_have_to_divide_the_iterations_they_are_in(parse):  # noqa: F811
    args = parse(PACI + "--paci-accum-schedule sync:0,4:20,8:100")  # 8 microbatches
    check(args)
    assert windows(args) == [(20, 4, 8), (100, 8, 8)] and shortest_window(args) == 4
    args.paci_accum_schedule = "3:0,sync:20,16:100"
    [line] = violations(args)
    assert ("--paci-accum-schedule 3:0,sync:20,16:100: an accumulation has to divide the "
            "microbatches of an iteration") in line
    assert ("3 not the 8 microbatches of an iteration from sample 0 on and 16 not the 8 "
            "microbatches of an iteration from sample 100 on") in line


def test_windows_may_grow_with_the_batch(parse):  # noqa: F811
    args = parse(PACI + "--paci-accum-schedule sync:0,4:256,12:768")
    args.step_batch_size_schedule, args.global_batch_size = "0:6 200:16 512:24", None
    args.seq_length = None  # thresholds in samples
    check(args)
    assert windows(args) == [(256, 4, 8), (512, 4, 12), (768, 12, 12)]
    args.paci_accum_schedule = "sync:0,4:256,12:511"
    [line] = violations(args)
    assert "12 not the 8 microbatches of an iteration from sample 511 on. Remedy" in line


def test_one_accumulation_is_enough(parse):  # noqa: F811
    [line] = violations(parse(PACI + "--paci-accum 4 --paci-accum-schedule sync:0,4:32"))
    assert "--paci-accum 4, --paci-accum-schedule sync:0,4:32: both say" in line


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_phases_mean_nothing_under_another_schedule(parse, schedule):  # noqa: F811
    [line] = violations(
        parse(f"{BASE} --pipeline-schedule {schedule} --paci-accum-schedule sync:0,4:32")
    )
    assert "--paci-accum-schedule sync:0,4:32: has no meaning" in line
    assert f"under --pipeline-schedule {schedule}" in line
