"""Phases of ``--paci-accum-schedule``: the same as separate runs that hand over by checkpoints.

A synchronous phase is compared with Megatron without any hook. Clipping is on and its norm often
exceeded: only in a synchronous phase are all gradients known when a stage clips.
"""

from __future__ import annotations

import pytest
import torch

from tests.gloo.checkpoints import checkpoint_values
from tests.gloo.launch import flags, launch
from tests.gloo.observed import checkpoint_tensors
from tests.gloo.scenarios import TIED

PACI = "--pipeline-schedule paci"
SHARED = "--clip-grad 0.3 --ckpt-format torch_dist --save-interval 2 --log-num-zeros-in-grad"
ALL = ("start", "end", "window", "never", "resumed")
SETUPS = {
    # name: (ranks, flags, which of the phases); two stages, four iterations of 16 samples
    "tied": (2, "--eval-interval 3 --eval-iters 1", ALL),
    "fp16": (2, "--fp16 --initial-loss-scale 65536 --untie-embeddings-and-output-weights",
             ("start", "end")),
    "experts": (2, "--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type "
                   "aux_loss --moe-aux-loss-coeff 1e-1", ("start", "end")),
    "replicas": (4, "--bf16 --use-distributed-optimizer --overlap-grad-reduce "
                    "--overlap-param-gather", ("start", "end", "never", "resumed")),
}
PHASES = {
    # name: (flags of the first two iterations, of the last two, of all four)
    "start": ("", f"{PACI} --paci-accum 2", "sync:0,2:32"),
    "end": (f"{PACI} --paci-accum 2", "", "2:0,sync:32"),
    "window": (f"{PACI} --paci-accum 4", f"{PACI} --paci-accum 2", "4:0,2:31"),
    "never": ("", "", "sync:0"),
    # Resumed within its second phase.
    "resumed": (*2 * [f"{PACI} --paci-accum-schedule 4:0,sync:16,2:48"], "4:0,sync:16,2:48"),
}
CASES = [(setup, phases) for setup, (_, _, which) in SETUPS.items() for phases in which]


def run(num_ranks: int, folder) -> dict:
    scenarios = {}
    for setup, phases in CASES:
        ranks, extra, _ = SETUPS[setup]
        if ranks != num_ranks:
            continue
        first, second, whole = PHASES[phases]
        path = folder / f"{setup}-{phases}"
        for part, schedule, kept in (
            ("first", first, f"--exit-interval 2 --save {path}"),
            ("second", second, f"--load {path}"),
            # Else without checkpoints, which drain.
            ("whole", f"{PACI} --paci-accum-schedule {whole}",
             f"--save {path}-whole" if phases == "never" else ""),
        ):
            scenarios[f"{part}-{setup}-{phases}"] = {
                "arguments": flags(2, f"{SHARED} {extra} {schedule} {kept}", TIED),
                "plugin": PACI in schedule,
            }
    return launch(num_ranks, scenarios, folder / f"ranks-{num_ranks}", seconds=500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("phases")


@pytest.fixture(scope="module")
def runs(folder):
    return run(2, folder) | run(4, folder)


@pytest.mark.parametrize("setup, phases", CASES)
def test_phases_equal_runs_that_hand_over_by_checkpoints(runs, setup, phases):
    first, second, whole = (runs[f"{part}-{setup}-{phases}"]
                            for part in ("first", "second", "whole"))
    assert len(whole[-1]["losses"]) == 4
    for one, two, both in zip(first, second, whole, strict=True):
        for key in ("losses", "grad_norms", "evaluations", "router_metrics"):
            assert both[key] == one[key] + two[key], key
        for key in ("weights", "optimizer", "learning_rate", "loss_scale"):
            assert both[key] == two[key], key


def test_a_synchronous_phase_is_megatron_and_not_paci(runs):
    """Guards the test above."""
    for setup, (ranks, _, which) in SETUPS.items():
        microbatches = 8 // (ranks // 2)
        whole = runs[f"whole-{setup}-start"]
        assert all(rank["statistics"]["updates"] == 2 * microbatches // 2 for rank in whole)
        ends = {str(runs[f"whole-{setup}-{each}"][0]["weights"]) for each in which}
        assert len(ends) == len(which)
    assert not any(rank["actions"] for rank in runs["whole-tied-never"])


@pytest.mark.parametrize("setup", ["tied", "replicas"])
def test_a_checkpoint_of_a_synchronous_phase_is_the_one_of_megatron(runs, folder, setup):
    stock, phased = (folder / f"{setup}-never{which}" for which in ("", "-whole"))
    first, second = (checkpoint_tensors(path, iteration=2) for path in (stock, phased))
    assert first.keys() == second.keys() and len(first) > 20
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    values = checkpoint_values(phased)
    assert values["args/paci_accum_schedule"] == "sync:0"


def test_after_a_synchronous_phase_paci_needs_no_more_memory_than_without_one(runs):
    """The tied copy has an optimizer state in such a phase alone."""
    start, without = (runs[f"whole-tied-{phases}"] for phases in ("start", "window"))
    for one, other in zip(start, without, strict=True):
        assert abs(one["bytes"] - other["bytes"]) < 2**16  # that state is twice as much
