"""Reports and the ledger, by hand."""

import math

import pytest

from megatron_paci.exit_request import ExitRequest
from megatron_paci.report import EXIT_ON_DURATION, EXIT_ON_SIGNAL, REPORT_LENGTH, Ledger, Report


def test_a_report_survives_its_vector():
    report = Report(7, 0.1, 3.0, 2, 640.0, 65536.0, EXIT_ON_SIGNAL)
    assert len(report.vector()) == REPORT_LENGTH
    assert Report.from_vector(list(report.vector())) == report
    assert math.isnan(Report.from_vector(Report(1, math.nan).vector()).sum_of_squares)
    with pytest.raises(ValueError):
        Report.from_vector([1.0])


def ledgers(clip="pipelined"):
    return [Ledger(clip=clip, is_first=stage == 0) for stage in range(3)]


def close(stages, window, squares, skipped=(0, 0, 0)):
    later = None
    for stage in (2, 1, 0):
        own = Report(window, squares[stage], skipped=skipped[stage])
        later = stages[stage].close(own, later, math.sqrt(squares[stage]))
    return later


def carry(stages, window):
    earlier, partial = None, []
    for stage in range(3):
        if earlier is not None:
            partial.append(stages[stage].hear(earlier))
        earlier = stages[stage].tell(window)
    return partial


def test_later_stages_count_exactly_and_earlier_ones_when_heard_of():
    stages = ledgers()
    total = close(stages, 0, (1.0, 4.0, 20.0))
    assert total.sum_of_squares == 25.0
    assert [ledger.grad_norm for ledger in stages] == [5.0, math.sqrt(24.0), math.sqrt(20.0)]
    assert stages[0].newest.grad_norm == 5.0 and stages[2].newest is None
    carry(stages, 0)
    assert [ledger.newest.grad_norm for ledger in stages] == [5.0, 5.0, 5.0]
    close(stages, 1, (100.0, 8.0, 31.0))
    assert [ledger.grad_norm for ledger in stages] == [
        math.sqrt(139.0), math.sqrt(8.0 + 31.0 + 1.0), math.sqrt(31.0 + 1.0 + 4.0)
    ]


def test_local_clipping_knows_only_itself_but_still_logs_the_whole():
    stages = ledgers("local")
    close(stages, 0, (1.0, 4.0, 20.0))
    carry(stages, 0)
    close(stages, 1, (9.0, 16.0, 25.0))
    assert [ledger.grad_norm for ledger in stages] == [3.0, 4.0, 5.0]
    assert stages[2].newest.grad_norm == 5.0 and stages[2].newest.window == 0


def test_one_stage_keeps_megatrons_own_rounding():
    ledger = Ledger(clip="pipelined", is_first=True)
    norm = 0.1234567  # its square root of the square is another number
    ledger.close(Report(0, norm * norm), None, norm)
    assert ledger.grad_norm == norm == ledger.newest.grad_norm


def test_what_is_not_finite_is_not_taken_for_a_norm():
    stages = ledgers()
    close(stages, 0, (1.0, 1.0, 1.0))
    carry(stages, 0)
    close(stages, 1, (math.inf, math.nan, 4.0), skipped=(1, 1, 0))
    assert carry(stages, 1) == [False, True]  # only the last stage had stepped
    assert stages[2].earlier == 2.0
    assert stages[2].newest.skipped == 2


def drain(stages):
    outstanding = [ledger.outstanding() for ledger in stages]
    return [ledger.settle(outstanding) for ledger in stages]


def test_a_drain_tells_all_and_forgets_what_clipping_knew():
    stages = ledgers()
    close(stages, 0, (1.0, 4.0, 20.0))
    carry(stages, 0)
    close(stages, 1, (9.0, 0.0, 16.0))
    assert [partial for partial in drain(stages) if partial] == []
    assert [ledger.newest.grad_norm for ledger in stages] == [5.0, 5.0, 5.0]
    assert [ledger.newest.window for ledger in stages] == [1, 1, 1]
    close(stages, 2, (1.0, 4.0, 20.0))
    assert stages[2].grad_norm == math.sqrt(20.0)
    assert drain(ledgers()) == [[], [], []]


def test_a_drain_reveals_partial_updates_no_report_had_time_for():
    stages = ledgers()
    close(stages, 0, (math.nan, 4.0, 4.0), skipped=(1, 0, 0))
    close(stages, 1, (1.0, 4.0, 4.0))
    found = drain(stages)
    assert found[0] == []
    assert [(report.window, report.skipped) for report in found[1] + found[2]] == [(0, 1), (0, 1)]


def test_nothing_piles_up():
    stages = ledgers()
    for window in range(50):
        close(stages, window, (1.0, 1.0, 1.0))
        carry(stages, window)
    assert all(not ledger._closed for ledger in stages)


def test_reports_of_different_windows_do_not_mix():
    ledger = Ledger(clip="pipelined", is_first=False)
    with pytest.raises(AssertionError, match="window 1 meets 0"):
        ledger.close(Report(1, 1.0), Report(0, 1.0), 1.0)


def test_the_first_stage_decides_and_the_others_follow():
    wish = []
    first = ExitRequest(is_first=True, local=lambda: 0)
    last = ExitRequest(is_first=False, local=lambda: sum(wish))
    assert last.wishes() == 0 and first.announce() == 0
    wish.append(EXIT_ON_SIGNAL)
    last.hear_wishes(last.wishes())
    assert last.announce() == 0  # its own wish is no decision
    first.hear_wishes(last.wishes())
    assert first.announce() == EXIT_ON_SIGNAL == first.decision
    last.hear_decision(first.announce())
    assert last.decision == EXIT_ON_SIGNAL


def test_at_a_drain_every_stage_decides_from_the_same_wishes():
    first = ExitRequest(is_first=True, local=lambda: 0)
    last = ExitRequest(is_first=False, local=lambda: EXIT_ON_SIGNAL)
    for stage in (first, last):
        for wishes in (first.wishes(), last.wishes()):
            stage.hear_wishes(wishes)
        stage.decide()
    assert first.decision == last.decision == EXIT_ON_SIGNAL


def test_replicas_of_the_first_stage_agree():
    first = ExitRequest(is_first=True, local=lambda: 0, agree=lambda bits: bits | EXIT_ON_DURATION)
    assert first.announce() == EXIT_ON_DURATION
