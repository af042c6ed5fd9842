"""examples/pretrain_gpt.py in which the second stage changes an activation that it has saved."""

from __future__ import annotations

from unittest import mock

import torch

from examples import pretrain_gpt
from megatron_paci.compute import MegatronCompute

forward = MegatronCompute.forward


def spoiling_forward(compute, microbatch, input_tensor, first_of_version):
    output_tensor = forward(compute, microbatch, input_tensor, first_of_version)
    if microbatch == 5 and input_tensor is not None:
        with torch.no_grad():
            input_tensor.mul_(2)
    return output_tensor


if __name__ == "__main__":
    with mock.patch.object(MegatronCompute, "forward", spoiling_forward):
        pretrain_gpt.main()
