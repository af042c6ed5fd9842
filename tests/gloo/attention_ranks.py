"""Attention over context-parallel ranks beside that of one rank; a script for worker.py.

Every rank computes the whole in float64 and compares its part of it: outputs, and gradients of
queries, keys, values and weights. The greatest difference of each, by case, goes to
``FOLDER/attention.rank<r>.json``. ::

    attention_ranks.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

SEQUENCE, SAMPLES, HEADS, HEAD_SIZE = 16, 2, 4, 8
CASES = {
    # name: (query groups, whether a mask is given, other parameters of the configuration)
    "causal": (4, False, {}),
    "grouped queries": (2, False, {}),
    "given mask": (4, True, {}),
    "learnable sink": (4, False, {"softmax_type": "learnable"}),
    "layer scaling": (4, False, {"apply_query_key_layer_scaling": True}),
}


def attention(ranks: int, groups: int, **parameters) -> torch.nn.Module:
    """Build Megatron's own attention, with the same weights at every call."""
    torch.manual_seed(1)  # the sink is drawn
    config = TransformerConfig(
        num_layers=2, hidden_size=HEADS * HEAD_SIZE, num_attention_heads=HEADS,
        num_query_groups=groups, context_parallel_size=ranks, attention_dropout=0.0,
        params_dtype=torch.float64, masked_softmax_fusion=False, **parameters,
    )
    return DotProductAttention(
        config, 2, AttnMaskType.causal, "self",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"]),
    )


def part(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    """Return this rank's part of a tensor by Megatron's own function, which splits dimension 1."""
    moved = {"it": tensor.transpose(dimension, 1).contiguous()}
    group = parallel_state.get_context_parallel_group()
    moved = get_batch_on_this_cp_rank(moved, is_hybrid_cp=False, cp_group=group)["it"]
    return moved.transpose(dimension, 1).contiguous()


def run(
    module: torch.nn.Module,
    inputs: list[torch.Tensor],
    mask: torch.Tensor | None,
    output_grad: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the output, the gradients of ``inputs``, and those of the weights."""
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    output = module(*inputs, mask)
    output.backward(output_grad)
    leaves = [*inputs, *module.parameters()]
    return [output.detach(), *(tensor.grad for tensor in leaves)]


def differences(ranks: int, groups: int, masked: bool, parameters: dict) -> dict[str, float]:
    """Return the greatest difference to one rank's results, by name of the tensor."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(SEQUENCE, SAMPLES, heads, HEAD_SIZE) for heads in (HEADS, groups, groups)]
    shapes.append((SEQUENCE, SAMPLES, HEADS * HEAD_SIZE))
    *tensors, output_grad = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    mask = None
    if masked:  # causal, and one token that nobody else may look at
        mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()
        mask[4:, 3] = True
        mask = mask.expand(SAMPLES, 1, -1, -1)

    whole = run(attention(1, groups, **parameters), tensors, mask, output_grad)
    mine = run(
        attention(ranks, groups, **parameters),
        [part(tensor, 0) for tensor in tensors],
        None if mask is None else part(mask, 2),
        part(output_grad, 0),
    )
    for gradient in mine[4:]:  # of weights: data parallelism sums them
        torch.distributed.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
    expected = [part(tensor, 0) for tensor in whole[:4]] + whole[4:]
    names = ("output", "query", "key", "value", "sink")
    return {
        name: float((one - other).abs().max())
        for name, one, other in zip(names, mine, expected)
    }


def main(folder: Path) -> None:
    """Try every case with all ranks in one group, and with two groups of two."""
    torch.distributed.init_process_group("gloo")
    found = {}
    for ranks in (2, 4):
        parallel_state.initialize_model_parallel(context_parallel_size=ranks)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        for name, case in CASES.items():
            found[f"{name}, {ranks} ranks"] = differences(ranks, *case)
        parallel_state.destroy_model_parallel()
    (folder / f"attention.rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
