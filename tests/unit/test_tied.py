"""What the owner of a tied embedding relies on when it lets go of the weights it has sent."""

from __future__ import annotations

import pytest

from megatron_paci.schedule import STEP, Kind, StageSchedule
from megatron_paci.tied import TiedEmbedding


@pytest.mark.parametrize("extra, deferred", [(0, False), (1, False), (0, True), (2, True)])
def test_with_a_gradient_of_the_copy_weights_so_old_have_arrived(extra, deferred):
    """The copy sends the gradient of a window at its step, and takes weights with its forwards."""
    for num_stages in range(2, 7):
        for accumulation in range(1, 9):
            first, last = (
                StageSchedule(stage, num_stages, accumulation, extra, deferred)
                for stage in (0, num_stages - 1)
            )
            owner = TiedEmbedding.__new__(TiedEmbedding)
            owner.begin_stream(first)
            taken = window = 0
            slack = []
            for action in last.finite(accumulation * (4 + 2 * first.depth // accumulation)):
                if action is STEP:
                    relied_upon = window - owner._windows_taken_late + 1  # weights from 0 on
                    assert taken >= relied_upon
                    slack += [taken - relied_upon] * (relied_upon > 0)
                    window += 1
                elif action.kind is Kind.FORWARD:
                    taken += last.reported_window(action.microbatch) is not None
            assert min(slack) == 0
