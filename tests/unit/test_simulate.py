"""Simulated schedules against closed forms, in exact numbers."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from megatron_paci.schedule import StageSchedule
from megatron_paci.simulate.figures import Memory, measure, num_passes, peak
from megatron_paci.simulate.orders import Task, Work
from megatron_paci.simulate.schedules import NAMES, paci, plan
from megatron_paci.simulate.timing import Costs, timeline

SHAPES = [(n, m) for n in (1, 2, 3, 5) for m in (1, 2, 3, 5, 9, 10)]
COSTS = [(1, 1, 1), (2, 2, 1), (3, 4, 2), (10, 9, 8)]


def figures(name, n, m, costs=None, *, iterations=1, memory=None, **arguments):
    return measure(
        lambda count: plan(name, n, m, iterations=count, **arguments),
        costs or Costs.equal(n), memory or Memory.in_microbatches(n), iterations=iterations,
    )


def spans(name, n, m, costs, **arguments):
    """Return the time of each stage from its first pass to its last, in one iteration."""
    made = plan(name, n, m, **arguments)
    passes = [
        [event for event in timeline(made.orders, made.path, costs)
         if event.stage == stage and event.task.work is not Work.STEP]
        for stage in range(n)
    ]
    return [own[-1].end - own[0].start for own in passes]


def runnable(name, n, m):
    return name != "interleaved" or n > 1 and m % n == 0


def text(order):
    return " ".join(map(str, order))


def test_orders_of_a_small_pipeline_as_one_reads_them():
    assert text(plan("gpipe", 2, 2).orders[1]) == "F0 F1 B0 B1 STEP0"
    assert text(plan("1f1b", 2, 3).orders[0]) == "F0 F1 B0 F2 B1 B2 STEP0"
    assert text(plan("paci", 2, 2, iterations=2).orders[0]) == (
        "F0 F1 B0 F2 B1 STEP0 F3 B2 B3 STEP1"
    )
    assert text(plan("interleaved", 2, 2).orders[0]) == (
        "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1 STEP0"
    )
    assert text(plan("zb-h1", 2, 3).orders[1]) == "F0 I0 F1 I1 W0 F2 I2 W1 W2 STEP0"
    assert text(plan("zb-h2", 2, 3).orders[0]) == "F0 F1 F2 I0 W0 I1 W1 I2 W2 STEP0"
    assert text(plan("zbv", 1, 2).orders[0]) == (
        "F0 F0.1 I0.1 W0.1 F1 I0 W0 F1.1 I1.1 W1.1 I1 W1 STEP0"
    )
    assert text(plan("zbv", 2, 4).orders[1]) == (
        "F0 F0.1 F1 F1.1 I0.1 W0.1 F2 I0 W0 F2.1 I1.1 W1.1 F3 I1 W1 F3.1 I2.1 W2.1 "
        "I2 I3.1 I3 W2 W3.1 W3 STEP0"
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_pass_is_made_once_and_after_its_input(name):
    for n, m in [*SHAPES, (8, 4), (8, 16)]:
        if not runnable(name, n, m):
            continue
        made = plan(name, n, m, iterations=2, chunks=3)
        split = name.startswith("zb")
        kinds = [Work.FORWARD] + (
            [Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT] if split else [Work.BACKWARD]
        )
        expected = {Task(work, index, chunk)
                    for work in kinds for index in range(2 * m) for chunk in range(made.chunks)}
        expected |= {Task(Work.STEP, 0), Task(Work.STEP, 1)}
        for order in made.orders:
            assert Counter(order) == Counter(expected)
        # An independent check of the core: nothing begins before all it needs has ended.
        ends, place = {}, {pair: number for number, pair in enumerate(made.path)}
        events = timeline(made.orders, made.path, Costs.equal(n), joint_steps=made.joint_steps)
        for event in events:
            ends[place[event.stage, event.task.chunk], event.task.work, event.task.index] = event
        free = [0] * n
        for event in events:
            assert event.start >= free[event.stage]
            free[event.stage] = event.end
            task = event.task
            here, work, index = place[event.stage, task.chunk], task.work, task.index
            needs = []
            if work is Work.FORWARD and here:
                needs.append((here - 1, work, index))
            elif work in (Work.BACKWARD, Work.BACKWARD_INPUT):
                needs.append((here, Work.FORWARD, index))
                if here + 1 < len(made.path):
                    needs.append((here + 1, work, index))
            elif work is Work.BACKWARD_WEIGHT:
                needs.append((here, Work.BACKWARD_INPUT, index))
            assert all(ends[need].end <= event.start for need in needs)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_flush_costs_what_the_formula_says(name):
    for n, m in SHAPES:
        for forward, gradient, weights in COSTS[:2]:
            costs = Costs.equal(
                n, forward=forward, backward_input=gradient, backward_weight=weights
            )
            found = figures(name, n, m, costs)
            assert found.utilization == [Fraction(m, m + n - 1)] * n
            assert found.iteration_time == (m + n - 1) * (forward + gradient + weights)
            assert found.drift == 0


@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaving_costs_what_the_formula_says(v):
    for n, m in SHAPES:
        if runnable("interleaved", n, m):
            found = figures("interleaved", n, m, chunks=v)
            assert found.utilization == [Fraction(m * v, m * v + n - 1)] * n


def test_paci_is_always_busy_once_it_has_filled():
    for n, m in SHAPES:
        found = figures("paci", n, m)
        assert found.utilization == [1] * n
        assert found.iteration_time == 3 * m
        assert found.bubble == 0
        assert found.activations == [n - stage for stage in range(n)]
        assert found.drift == -((1 - n) // m)


def test_a_stream_takes_one_ramp():
    for n, m in SHAPES:
        made = plan("paci", n, m, iterations=5)
        events = timeline(made.orders, made.path, Costs.equal(n))
        assert max(event.end for event in events) == (5 * m + n - 1) * 3


def bubble(name, n, m, forward, gradient, weights):
    costs = Costs.equal(n, forward=forward, backward_input=gradient, backward_weight=weights)
    return max(spans(name, n, m, costs)) - m * (forward + gradient + weights)


@pytest.mark.parametrize("f, b, w", COSTS)
def test_the_bubbles_of_zero_bubble_schedules_are_those_of_their_paper(f, b, w):
    for n, m in SHAPES:
        assert bubble("1f1b", n, m, f, b, w) == (n - 1) * (f + b + w)
        if m >= n:
            assert bubble("zb-h1", n, m, f, b, w) == (n - 1) * (f + b - w)
        if m >= 2 * n - 1:
            assert bubble("zb-h2", n, m, f, b, w) == (n - 1) * (f + b - 2 * w)
        if m >= 2 * n and f == b == w:
            assert bubble("zbv", n, m, f, b, w) == 0


def test_without_a_common_step_zero_bubble_is_none_over_iterations():
    for n, m in SHAPES:
        if m >= 2 * n:
            for name in ("zb-h2", "zbv"):
                assert figures(name, n, m, iterations=3).utilization == [1] * n


def test_activations_are_those_of_the_papers():
    for n, m in SHAPES:
        plans = {name: plan(name, n, m) for name in NAMES if runnable(name, n, m)}
        kept = {
            name: [peak(order, 1, 1, made.chunks) for order in made.orders]
            for name, made in plans.items()
        }
        assert kept["gpipe"] == [m] * n
        assert kept["1f1b"] == [min(m, n - stage) for stage in range(n)]
        if m >= n:
            assert kept["zb-h1"] == [n] * n
        if m >= 2 * n - 1:
            assert kept["zb-h2"] == [2 * n - 1] * n
        if m >= 2 * n:
            assert kept["zbv"] == [n] * n
        if "interleaved" in kept and m > n:
            # 2 (n - i - 1) + n forwards ahead of one more, each of half a stage.
            assert kept["interleaved"] == [
                Fraction(2 * (n - stage - 1) + n + 1, 2) for stage in range(n)
            ]


def test_what_is_retained_counts_until_the_gradient_of_the_weights():
    order = [Task(Work.FORWARD, 0), Task(Work.BACKWARD_INPUT, 0), Task(Work.FORWARD, 1),
             Task(Work.BACKWARD_INPUT, 1), Task(Work.BACKWARD_WEIGHT, 0)]
    assert peak(order, 10, 4, 1) == 14
    assert peak(order, 10, 0, 1) == 10
    assert peak(order, 10, 4, 2) == 7
    memory = Memory([10, 20], [4, 4], [100, 200])
    assert figures("paci", 2, 4, memory=memory).memory == [120, 220]


@pytest.mark.parametrize("n", [2, 4, 8])
def test_latency_costs_a_round_trip_and_one_more_in_flight_per_link_hides_it(n):
    x = Fraction(1, 2)
    costs = Costs.equal(n, latency=x)

    def busy(orders):
        return set(measure(lambda count: paci(orders, n, iterations=count), costs,
                           Memory.in_microbatches(n), iterations=8).utilization)

    stages = range(n)
    # N passes of 3 per round trip over N - 1 links and back.
    plain = {Fraction(3 * n) / (3 * n + 2 * (n - 1) * x)}
    assert busy([StageSchedule(stage, n, 2) for stage in stages]) == plain
    # More everywhere, as if there were a stage more, lets the last stage delay its backward:
    # nothing gained.
    assert busy([StageSchedule(stage, n + 1, 2) for stage in stages]) == plain
    found = figures("paci", n, 4, costs, extra_in_flight=1)
    assert found.utilization == [1] * n
    assert found.activations == [2 * (n - stage) - 1 for stage in stages]
    assert found.drift == -(-(2 * n - 2) // 4)


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_latency_beyond_what_is_hidden_costs_what_the_longest_round_trip_takes(n, extra):
    """docs/performance.md: what a round trip over all links takes, by what is in flight meanwhile.

    A deferred step is somewhere else in the order of a stage and changes nothing of that.
    """
    for x in (Fraction(1, 3), Fraction(3, 2), Fraction(4)):
        in_flight, passes = (n - 1) * (1 + extra) + 1, 3
        longest = n * passes + 2 * (n - 1) * x
        expected = min(Fraction(1), Fraction(in_flight * passes) / longest)
        assert (expected == 1) == (x <= Fraction(extra * passes, 2))
        for deferred in (False, True):
            found = figures("paci", n, 2, Costs.equal(n, latency=x), extra_in_flight=extra,
                            defer_step=deferred)
            assert set(found.utilization) == {expected}


def test_a_deferred_step_takes_its_time_and_delays_no_message():
    """Three units per microbatch and a step of one for every two, wherever it falls."""
    costs = Costs.equal(4, step=1)
    for deferred in (False, True):
        found = figures("paci", 4, 4, costs, accumulation=2, defer_step=deferred)
        assert found.iteration_time == 4 * 3 + 2
        assert found.utilization == [1] * 4
        assert found.drift == (4 if deferred else 3 + 1) // 2


def test_a_flush_of_all_stages_waits_for_the_last_and_goes_on_together():
    costs = Costs([1, 1], [1, 1], [1, 1], [5, 1])
    found = figures("1f1b", 2, 2, costs)
    assert found.iteration_time == 9 + 5  # also for the stage whose step takes 1
    assert found.utilization == [Fraction(11, 14), Fraction(7, 14)]
    other = figures("1f1b", 2, 2, replace(costs, step=[1, 5]))
    assert other.iteration_time == 9 + 5
    assert other.utilization == [Fraction(7, 14), Fraction(11, 14)]
    # The last stage ends with two gradients of weights, at 15; the first one has been done by 7.
    made = plan("zb-h1", 2, 2)
    events = timeline(made.orders, made.path, Costs([1, 1], [1, 1], [1, 5], [1, 1]),
                      joint_steps=True)
    assert {event.start for event in events if event.task.work is Work.STEP} == {15}
    # Alone, the stage with the longer step is what all wait for, and nothing else.
    alone = figures("paci", 2, 2, costs)
    assert alone.iteration_time == 6 + 5
    assert alone.utilization == [1, Fraction(7, 11)]


def test_uneven_stages_by_hand():
    costs = Costs([1, 2], [1, 2], [1, 2], [0, 0])
    # One microbatch: forwards of 1 and 2, then backwards of 4 and 2.
    assert figures("1f1b", 2, 1, costs).utilization == [Fraction(3, 9), Fraction(6, 9)]
    assert figures("paci", 2, 4, costs).utilization == [Fraction(1, 2), 1]


def test_messages_within_a_stage_take_no_time():
    costs = Costs.equal(1, latency=7)
    assert spans("zbv", 1, 2, costs) == [6]
    # Four forwards, two gradients of inputs, one of weights on the last stage, two of inputs and
    # one of weights, each of half a stage; four messages, but none where the last stage turns.
    assert spans("zbv", 2, 1, Costs.equal(2, latency=7))[0] == Fraction(10, 2) + 4 * 7


def test_orders_that_wait_for_each_other_are_refused():
    orders = [[Task(Work.BACKWARD, 0), Task(Work.FORWARD, 0)],
              [Task(Work.FORWARD, 0), Task(Work.BACKWARD, 0)]]
    with pytest.raises(ValueError, match="wait for each other: stage 0 at B0, stage 1 at F0"):
        timeline(orders, [(0, 0), (1, 0)], Costs.equal(2))
    order = [Task(work, 0) for work in (Work.FORWARD, Work.BACKWARD_WEIGHT, Work.BACKWARD_INPUT)]
    with pytest.raises(ValueError, match="stage 0 at W0"):
        timeline([order], [(0, 0)], Costs.equal(1))


def test_numbers_stay_exact_and_floats_stay_floats():
    exact = figures("paci", 3, 4, Costs.equal(3, forward=Fraction(1, 3), latency=Fraction(1, 7)))
    assert isinstance(exact.utilization[0], Fraction)
    rough = figures("paci", 3, 4, Costs.equal(3, forward=1 / 3, latency=1 / 7))
    assert rough.utilization[0] == pytest.approx(float(exact.utilization[0]))


def test_the_count_of_passes_is_the_one_timed():
    # 3 stages are filled after 24 microbatches, 12 iterations of 2; 3 more are measured to have
    # whole round trips, and the end needs one more.
    assert num_passes(3, 2, 1) == 3 * 2 * (12 + 3 + 1)
