"""Outputs give their memory back and keep their graph."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from megatron.core.pipeline_parallel.schedules import custom_backward

from megatron_paci.compute import MegatronCompute


def compute(*, frees: bool) -> MegatronCompute:
    config = SimpleNamespace(
        deallocate_pipeline_outputs=frees,
        num_microbatches_with_partial_activation_checkpoints=None,
    )
    return MegatronCompute(
        None, config, depth=1, context_parallel_size=1, is_last_stage=False
    )


def test_released_outputs_share_one_element_and_still_have_their_gradients():
    ours = compute(frees=True)
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    outputs = [weight * factor for factor in (1, 10)]
    for output in outputs:
        ours.release(output)
    assert {output.untyped_storage().nbytes() for output in outputs} == {4}
    assert len({output.data_ptr() for output in outputs}) == 1
    for output in outputs:
        custom_backward(output, torch.ones(2))  # Megatron's, which insists on freed outputs
    assert weight.grad.tolist() == [11.0, 11.0]


def test_an_output_of_another_type_is_released_too():
    ours = compute(frees=True)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        output = torch.zeros(8, dtype=dtype)
        ours.release(output)
        assert output.dtype == dtype and output.numel() == 1


def test_outputs_are_kept_where_megatron_keeps_them():
    output = torch.zeros(8)
    compute(frees=False).release(output)
    assert output.numel() == 8
