"""What a window does with what it hears while it is open."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock, call

import torch

from megatron_paci.report import Report
from megatron_paci.window import MegatronWindow


def test_a_window_has_one_loss_scale_whatever_it_hears_meanwhile():
    """An overflow in an earlier stage lowers the scale of the next window, not of half a one."""
    scaler = Mock()
    optimizer = Mock(
        chained_optimizers=None, grad_scaler=scaler, config=SimpleNamespace(clip_grad=0.0)
    )
    window = MegatronWindow(
        Mock(parameters=lambda: iter(()), ddp_config=None), optimizer, None,
        SimpleNamespace(no_sync_func=None), None, None, stage=1, ledger=Mock(
            hear=Mock(return_value=True)
        ), exit_request=Mock(), take_num_tokens=Mock(),
    )
    window.prepare(last=False)
    window.hear(Report(0, torch.inf, skipped=1))
    window.prepare(last=True)
    assert window.partial == 1 and not scaler.update.called
    window.step()
    assert not scaler.update.called
    window.prepare(last=False)
    window.prepare(last=False)
    assert scaler.update.mock_calls == [call(True)]
