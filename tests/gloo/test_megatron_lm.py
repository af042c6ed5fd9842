"""Megatron-LM's own launch script, byte for byte, from a checkout that MEGATRON_LM names.

    git clone --branch core_v0.19.0 <Megatron-LM> m && MEGATRON_LM=$PWD/m make test
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gloo.launch import TINY_GPT, flags, launch

CHECKOUT = os.environ.get("MEGATRON_LM", "")
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM names no Megatron-LM checkout")

# Megatron's defaults: tied embeddings, clipping, dropout.
DEFAULTS = (
    TINY_GPT.replace(" --untie-embeddings-and-output-weights", "")
    .replace(" --attention-dropout 0 --hidden-dropout 0", "")
)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_pretrain_gpt_trains(tmp_path, num_stages):
    script = str(Path(CHECKOUT).resolve() / "pretrain_gpt.py")
    every = "--eval-interval 1 --eval-iters 1 --clip-grad 0"
    scenarios = {
        "paci": {"arguments": flags(num_stages, "--pipeline-schedule paci --paci-accum 4 "
                                                "--train-iters 12 --lr 1e-3", DEFAULTS)},
        "stock": {"arguments": flags(num_stages, every, DEFAULTS)},
        "drained": {"arguments": flags(num_stages, f"{every} --pipeline-schedule paci", DEFAULTS)},
    }
    scenarios = {name: each | {"script": script} for name, each in scenarios.items()}
    ranks = launch(num_stages, scenarios, tmp_path, seconds=240, fresh=True)
    losses = [entry["lm loss"] for entry in ranks["paci"][-1]["losses"]]
    assert len(losses) == 12 and losses[-1] < losses[0]
    for stock, drained in zip(ranks["stock"], ranks["drained"], strict=True):
        assert (drained["losses"], drained["weights"]) == (stock["losses"], stock["weights"])
