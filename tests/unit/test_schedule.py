"""The order and its closed forms, enumerated."""

from itertools import chain, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_paci.schedule import (
    STEP,
    Action,
    Kind,
    ScheduleError,
    StageSchedule,
    format_grid,
    validate,
)

SHAPES = [(n, a) for n in range(1, 9) for a in range(1, 10)]
# More microbatches in flight per link, and whether a step waits for a forward.
VARIANTS = [(0, False), (1, False), (2, False), (0, True), (1, True)]


def orders(num_stages, accumulation, num_microbatches, *variant):
    return [
        list(StageSchedule(stage, num_stages, accumulation, *variant).finite(num_microbatches))
        for stage in range(num_stages)
    ]


@pytest.mark.parametrize("text", ["F0", "F31", "B7", "STEP"])
def test_an_action_parses_back(text):
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F", "F-1", "G3", "STEP1", "F3 ", "f3", "F\u0663"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="not an action"):
        Action.parse(text)


def test_the_order_of_a_small_pipeline_as_one_reads_it():
    def text(stage, *variant):
        return " ".join(map(str, StageSchedule(stage, 3, 2, *variant).finite(4)))

    assert text(0) == "F0 F1 F2 B0 F3 B1 STEP B2 B3 STEP"
    assert text(1) == "F0 F1 B0 F2 B1 STEP F3 B2 B3 STEP"
    assert text(2) == "F0 B0 F1 B1 STEP F2 B2 F3 B3 STEP"
    assert text(1, 1) == "F0 F1 F2 B0 F3 B1 STEP B2 B3 STEP"
    assert text(2, 1) == text(2)
    assert text(1, 0, True) == "F0 F1 B0 F2 B1 F3 STEP B2 B3 STEP"
    assert text(2, 0, True) == "F0 B0 F1 B1 F2 STEP B2 F3 B3 STEP"


def test_the_order_has_no_end():
    actions = list(islice(chain.from_iterable(StageSchedule(0, 2, 4).ticks()), 10_000))
    assert len(actions) == 10_000
    assert max(action.microbatch or 0 for action in actions) > 4000


def enumerated_drifts(schedule, num_microbatches):
    """Return the drift of every microbatch, by counting steps in the order itself."""
    version, at_forward, drifts = 0, {}, []
    for action in schedule.finite(num_microbatches):
        if action is STEP:
            version += 1
        elif action.kind is Kind.FORWARD:
            at_forward[action.microbatch] = version
        else:
            drifts.append(version - at_forward[action.microbatch])
    return drifts


@pytest.mark.parametrize("extra, deferred", VARIANTS)
def test_drift_equals_its_closed_form_and_reaches_its_bound(extra, deferred):
    for num_stages, accumulation in SHAPES:
        for stage in range(num_stages):
            schedule = StageSchedule(stage, num_stages, accumulation, extra, deferred)
            depth = num_stages - stage + extra * (num_stages - 1 - stage)
            total = accumulation * (depth + 4)
            drifts = enumerated_drifts(schedule, total)
            assert drifts == [schedule.drift(j) for j in range(total)]
            assert max(drifts) == schedule.drift_bound
            # ceil((depth - 1) / a); with a deferred step one microbatch more.
            assert schedule.drift_bound == -((1 - depth - deferred) // accumulation)


@pytest.mark.parametrize("extra, deferred", VARIANTS)
@pytest.mark.parametrize("windows", [1, 3])
def test_all_stages_together_obey_the_rules(windows, extra, deferred):
    for num_stages, accumulation in SHAPES:
        count = accumulation * windows
        validate(
            orders(num_stages, accumulation, count, extra, deferred), accumulation, count,
            extra_in_flight=extra, defer_step=deferred,
        )


@settings(derandomize=True, deadline=None)
@given(st.data())
def test_drift_of_a_large_pipeline_equals_its_closed_form(data):
    num_stages = data.draw(st.integers(1, 64), "N")
    stage = data.draw(st.integers(0, num_stages - 1), "stage")
    accumulation = data.draw(st.integers(1, 64), "a")
    extra = data.draw(st.integers(0, 5), "more in flight per link")
    deferred = data.draw(st.booleans(), "deferred step")
    schedule = StageSchedule(stage, num_stages, accumulation, extra, deferred)
    total = accumulation * data.draw(st.integers(1, 8), "windows")
    drifts = enumerated_drifts(schedule, total)
    assert drifts == [schedule.drift(j) for j in range(total)]
    assert max(drifts) <= schedule.drift_bound


@settings(derandomize=True, deadline=None)
@given(
    num_stages=st.integers(1, 16), accumulation=st.integers(1, 12), windows=st.integers(1, 6),
    extra=st.integers(0, 4), deferred=st.booleans(),
)
def test_all_stages_of_a_large_pipeline_obey_the_rules(
    num_stages, accumulation, windows, extra, deferred
):
    count = accumulation * windows
    validate(
        orders(num_stages, accumulation, count, extra, deferred), accumulation, count,
        extra_in_flight=extra, defer_step=deferred,
    )


@pytest.mark.parametrize("extra, deferred", VARIANTS)
def test_in_flight_reaches_the_throttle_and_no_more(extra, deferred):
    for num_stages, accumulation in SHAPES:
        for stage in range(num_stages):
            in_flight = peak = 0
            schedule = StageSchedule(stage, num_stages, accumulation, extra, deferred)
            for action in schedule.finite(24 * accumulation):
                in_flight += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD)
                peak = max(peak, in_flight)
            assert peak == num_stages - stage + extra * (num_stages - 1 - stage)


def test_the_stream_takes_one_ramp_however_many_windows_it_spans():
    """In unit time: two slots per microbatch, and (N - 1) slots up and down once, at the ends."""
    for num_stages, accumulation in SHAPES:
        count = accumulation * 20
        grid = validate(orders(num_stages, accumulation, count), accumulation, count)
        first_row = grid.splitlines()[0].split("| ")[1]
        width = max(len(cell) for line in grid.splitlines() for cell in line.split()[3:])
        slots = -(-(len(first_row) + 1) // (width + 1))  # stage 0 finishes last
        assert slots == 2 * count + 2 * (num_stages - 1)


@pytest.mark.parametrize("extra, deferred", VARIANTS)
def test_reports_ride_in_order_after_the_step_and_with_the_stated_lag(extra, deferred):
    for num_stages, accumulation in SHAPES:
        depth = num_stages + extra * (num_stages - 1)
        windows = 8 + 3 * depth // accumulation
        for stage in range(num_stages):
            schedule = StageSchedule(stage, num_stages, accumulation, extra, deferred)
            steps, newest, lags = 0, -1, set()
            for action in schedule.finite(accumulation * windows):
                if action is STEP:
                    filled = depth <= steps * accumulation < accumulation * windows - 2 * depth
                    lags |= {steps - newest} if filled else set()
                    steps += 1
                elif action.kind is Kind.FORWARD:
                    window = schedule.reported_window(action.microbatch)
                    if window is not None:
                        assert window == newest + 1
                        assert window < steps  # taken here, too
                        newest = window
            assert lags == {schedule.report_lag}


@pytest.mark.parametrize("extra, deferred", VARIANTS)
def test_a_report_rides_with_the_first_forward_of_the_first_stage_after_its_step(extra, deferred):
    for num_stages, accumulation in SHAPES:
        first, last = (
            StageSchedule(stage, num_stages, accumulation, extra, deferred)
            for stage in (0, num_stages - 1)
        )
        steps = told = 0
        for action in first.finite((first.depth // accumulation + 4) * accumulation):
            if action is STEP:
                steps += 1
            elif action.kind is Kind.FORWARD:
                assert last.version_at_forward(action.microbatch, stage=0) == steps
                window = steps - 1 if steps > told else None
                assert last.reported_window(action.microbatch) == window
                told = steps


@pytest.mark.parametrize("extra, deferred", VARIANTS)
def test_when_a_stage_sends_it_has_taken_what_channel_py_says(extra, deferred):
    for num_stages, accumulation in SHAPES:
        for stage in range(num_stages):
            schedule = StageSchedule(stage, num_stages, accumulation, extra, deferred)
            forwards = backwards = steps = 0
            for action in islice(chain.from_iterable(schedule.ticks()), 40):
                if action is STEP:
                    steps += 1
                elif action.kind is Kind.BACKWARD:
                    assert forwards == action.microbatch + schedule.depth
                    backwards += 1
                else:
                    assert backwards == max(0, action.microbatch - schedule.depth + 1)
                    # Of the reports behind these gradients, those that a step has taken.
                    assert steps == max(0, backwards - deferred) // accumulation
                    forwards += 1


@pytest.mark.parametrize(
    "stage, change, message",
    [
        (0, lambda order: [order[0], *order], "expected microbatch 1"),
        (1, lambda order: order[:-1], "1 steps, expected 2"),
        (1, lambda order: [a for a in order if a is not STEP], "window is full"),
        (0, lambda order: order[::-1], "step after 0 backwards"),
        (0, lambda order: sorted(order, key=lambda a: a.kind is not Kind.FORWARD), "throttle"),
        (2, lambda order: [order[1], order[0], *order[2:]], "before its forward"),
        (2, lambda order: order[:2], "deadlock"),
    ],
)
def test_the_validator_marks_a_broken_order(stage, change, message):
    broken = orders(3, 2, 4)
    broken[stage] = change(broken[stage])
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(broken, 2, 4)
    assert "!" in str(caught.value) and "stage 0 |" in str(caught.value)


def test_the_validator_tells_the_variations_apart():
    given = {
        variant: orders(3, 2, 6, *variant) for variant in ((0, False), (1, False), (0, True))
    }
    messages = {
        ((1, False), (0, False)): "throttle allows 3",
        ((0, True), (0, False)): "window is full but no step",
        ((0, False), (0, True)): "a deferred step comes after the next forward",
    }
    for (found, (extra, deferred)), message in messages.items():
        with pytest.raises(ScheduleError, match=message):
            validate(given[found], 2, 6, extra_in_flight=extra, defer_step=deferred)
    late = [list(order) for order in given[0, True]]
    late[2] = [action for action in late[2] if action is not STEP]
    with pytest.raises(ScheduleError, match="window is full but no step"):
        validate(late, 2, 6, defer_step=True)


def test_the_grid_is_aligned():
    assert format_grid([["F0", "", "B0*"], ["", "F0"]]) == "stage 0 | F0      B0*\nstage 1 |     F0"


@pytest.mark.parametrize(
    "arguments, message",
    [((2, 2, 1), "not one of 2 stages"), ((0, 2, 0), "at least 1"), ((0, 4, 1, -1), "at least 0")],
)
def test_bad_parameters_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        StageSchedule(*arguments)
