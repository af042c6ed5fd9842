"""What the channel refuses to send."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from megatron_paci.channel import PipelineChannel
from megatron_paci.groups import StageGroups
from megatron_paci.schedule import StageSchedule


def test_an_output_of_another_shape_is_refused_before_it_is_sent():
    groups = StageGroups(alone=None)
    channel = PipelineChannel(groups, SimpleNamespace(), shape=lambda: (32, 2, 64))
    channel._forward_out = Mock()
    channel._backward_in = Mock(has_posted=True)
    channel.begin_stream(StageSchedule(0, 2, 1))
    channel.send_forward(0, torch.zeros(32, 2, 64))
    with pytest.raises(ValueError, match=r"microbatch 1 has shape \(16, 2, 64\).*variable_seq_le"):
        channel.send_forward(1, torch.zeros(16, 2, 64))
    assert channel._forward_out.send.call_count == 1
