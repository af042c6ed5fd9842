"""Simulated time against closed forms."""

import pytest

from megatron_paci.schedule import Action, StageSchedule
from megatron_paci.simulate import simulate, utilization


def paci(num_stages, count, per_link=0, everywhere=0, **costs):
    return simulate(
        [
            [list(StageSchedule(
                s, num_stages, 1, num_stages - s + everywhere + per_link * (num_stages - 1 - s)
            ).finite(count))]
            for s in range(num_stages)
        ],
        **costs,
    )


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
def test_1f1b_takes_what_the_formula_says(n, m):
    windows = 3
    passes = simulate([[list(StageSchedule(s, n, m).finite(m)) for _ in range(windows)]
                       for s in range(n)])
    assert max(item.end for item in passes) == windows * (m + n - 1) * 3


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_paci_is_always_busy_once_it_has_filled(n):
    passes = paci(n, 60)
    assert max(item.end for item in passes) == (60 + n - 1) * 3
    assert {utilization(passes, s, since=20, until=40) for s in range(n)} == {1.0}


@pytest.mark.parametrize("n", [2, 4, 8])
def test_latency_costs_a_round_trip_and_one_slot_more_per_link_hides_it(n):
    window = {"since": 60, "until": 100}
    plain, alike, graded = (
        utilization(paci(n, 200, latency=0.5, **more), 0, **window)
        for more in ({}, {"everywhere": 1}, {"per_link": 1})
    )
    # N passes of 3 per round trip over N - 1 links and back.
    assert plain == pytest.approx(3 * n / (3 * n + n - 1), rel=0.01)
    # More everywhere lets the last stage delay its backward: nothing gained.
    assert alike == pytest.approx(plain, rel=0.01)
    assert graded == 1.0


def test_orders_that_wait_for_each_other_are_refused():
    text = (["B0", "F0"], ["F0", "B0"])
    with pytest.raises(ValueError, match="wait for each other"):
        simulate([[[Action.parse(t) for t in stage]] for stage in text])
