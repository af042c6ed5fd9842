"""What went wrong elsewhere, tried here; docs/scenarios.md lists all of it.

The numbers of the sections are those of that list. Comparisons are to the last bit.
"""

from __future__ import annotations

import json
import re

import pytest
import torch

from megatron_paci.schedule import StageSchedule
from tests.gloo.launch import TINY_GPT
from tests.gloo.observed import (
    PACI,
    Launches,
    add_slowed,
    add_tied,
    checkpoint_tensors,
    output,
)

DEFAULT_RERUN = TINY_GPT.replace("--rerun-mode disabled ", "")
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# At this learning rate weights do not move, so staleness makes no difference.
FROZEN = "--lr 1e-20 --clip-grad 0 --eval-iters 0"
FROZEN_VARIANTS = {
    "masked": "--uneven-masks",
    "per-token": "--uneven-masks --calculate-per-token-loss",
    "dropout": DROPOUT,
}
SAMPLES = 2  # per microbatch


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    launches = Launches(2, tmp_path_factory.mktemp("two"))
    add, folder = launches.add, launches.folder
    for name, extra in FROZEN_VARIANTS.items():
        add(f"stock-{name}", f"{FROZEN} {extra} --global-batch-size 4 --train-iters 8")
        add(f"paci-{name}", f"{FROZEN} {extra} {PACI} 2 --train-iters 2")
    add("paci-recompute", f"{FROZEN} {DROPOUT} {RECOMPUTE} {PACI} 2 --train-iters 2")

    logged = f"{FROZEN} --log-interval 2 --train-iters 6 --iterations-to-skip 4"
    add("stock-logged", logged, DEFAULT_RERUN)
    add("paci-logged", f"{logged} {PACI} 2", DEFAULT_RERUN)
    add("poisoned", f"{PACI} 4", DEFAULT_RERUN,
        poison={"stage": 1, "microbatch": 10, "where": "backward"})
    # In the fourth window, whose step the drain for the evaluation takes.
    add("poisoned-deferred", f"{PACI} 4 --paci-defer-step --eval-interval 1 --eval-iters 1",
        DEFAULT_RERUN, poison={"stage": 1, "microbatch": 14, "where": "backward"})
    for name, schedule in (("stock-clipped", ""), ("paci-clipped", f"{PACI} 4")):
        add(name, f"--clip-grad 0.01 {schedule}", stages=1)  # two replicas of one stage

    add_tied(launches, "tied")
    common = f"{PACI} 2 --train-iters 6 --eval-interval 2 --eval-iters 1 --save-interval 3"
    add("whole", f"{common} --save {folder / 'whole'}")
    add("stopped", f"{common} --save {folder / 'parts'} --exit-interval 3")
    add("resumed", f"{common} --save {folder / 'parts'} --load {folder / 'parts'}")
    add_slowed(launches)
    return launches.run(seconds=300), folder


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    launches = Launches(3, tmp_path_factory.mktemp("three"))
    add_slowed(launches)
    return launches.run(seconds=120), launches.folder


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    launches = Launches(4, tmp_path_factory.mktemp("four"))
    launches.add("stock-m1", f"{FROZEN} --global-batch-size 2 --train-iters 6")
    launches.add("paci-m1", f"{FROZEN} --global-batch-size 2 {PACI} 1 --train-iters 6")
    launches.add("paci-m2", f"{FROZEN} --global-batch-size 4 {PACI} 1 --train-iters 3")
    add_tied(launches, "tied-sharded")
    add_slowed(launches)
    # Two replicas of two stages: 4, then 8 microbatches per iteration, in windows of 4.
    launches.add(
        "replicas",
        f"{PACI} 4 --overlap-grad-reduce --check-weight-hash-across-dp-replicas-interval 2 "
        f"--train-iters 6 --step-batch-size-schedule 0:16,1024:32",
        TINY_GPT.replace("--global-batch-size 16 ", ""), stages=2,
    )
    return launches.run(seconds=300), launches.folder


# 1, 5, 6, 9: the gradients of windows, against those of Megatron's own schedule


@pytest.mark.parametrize("name", FROZEN_VARIANTS)
def test_at_frozen_weights_losses_and_gradients_of_windows_are_those_of_1f1b(two, name):
    """A window of 2 of 8 microbatches is what a whole iteration of 2 is for 1F1B."""
    stock, paci = two[0][f"stock-{name}"], two[0][f"paci-{name}"]
    for one, other in zip(stock, paci, strict=True):
        assert other["gradients"] == one["gradients"] and len(one["gradients"]) == 8
        assert len(set(one["gradients"])) == 8
        assert other["losses"] == one["losses"]
    assert len(paci[-1]["losses"]) == 16 and paci[0]["losses"] == []


def test_masks_are_uneven_and_the_rule_of_the_loss_makes_a_difference(two):
    """Guards the oracle above."""
    counts = [count for _, count in two[0]["paci-masked"][1]["losses"]]
    assert len(set(counts)) > 4 and max(counts) <= SAMPLES * 32
    gradients = {two[0][f"paci-{name}"][1]["gradients"][0] for name in FROZEN_VARIANTS}
    assert len(gradients) == len(FROZEN_VARIANTS)


def test_recomputation_draws_the_dropout_of_the_forward_though_others_ran_between(two):
    for plain, recomputed in zip(two[0]["paci-dropout"], two[0]["paci-recompute"], strict=True):
        assert recomputed["gradients"] == plain["gradients"]
        assert recomputed["losses"] == plain["losses"]


# 4: fewer microbatches than stages


@pytest.mark.parametrize("name", ["paci-m1", "paci-m2"])
def test_a_pipeline_fills_over_iterations_and_logs_a_loss_from_the_first(four, name):
    stock, paci = four[0]["stock-m1"], four[0][name]
    iterations = 6 if name == "paci-m1" else 3
    assert [len(rank["iteration_losses"]) for rank in paci] == [iterations] * 4
    assert all("lm loss" in entry for entry in paci[3]["iteration_losses"])
    for one, other in zip(stock, paci, strict=True):
        assert other["losses"] == one["losses"]
        assert other["gradients"] == one["gradients"]
    assert len(paci[3]["losses"]) == 6
    assert paci[0]["actions"][:5] == ["F0", "F1", "F2", "F3", "B0"]


# 3: replicas


def test_replicas_reduce_once_per_window_while_the_number_of_windows_changes(four):
    """The weights are hashed and compared over replicas every 2 iterations; else it raises."""
    for rank in four[0]["replicas"]:
        windows = 2 * 1 + 4 * 2
        assert rank["statistics"]["updates"] == windows
        assert rank["buckets"] > 0
        expected = [version for version in range(windows) for _ in range(rank["buckets"])]
        assert rank["reductions"] == expected
        assert len(rank["gradients"]) == windows


def test_replicas_are_equal_after_the_number_of_windows_has_changed(four):
    first, copy, last, last_copy = four[0]["replicas"]
    assert first["weights"] == copy["weights"] != last["weights"] == last_copy["weights"]
    assert first["gradients"] == copy["gradients"]


# 7, 8: norms and numbers that are not finite


def test_clipping_hard_on_one_stage_is_megatrons_own(two):
    for stock, paci in zip(two[0]["stock-clipped"], two[0]["paci-clipped"], strict=True):
        for key in ("iteration_losses", "weights", "optimizer"):
            assert paci[key] == stock[key], key
        assert torch.tensor(paci["grad_norms"]).tolist() == stock["grad_norms"]  # rounds to fp32
        assert min(stock["grad_norms"]) > 0.01


def test_a_skipped_update_is_counted_where_megatron_counts_and_nothing_runs_again(two):
    runs, folder = two
    ranks = runs["poisoned"]
    # The third window: in the second iteration, and its last backwards fall into the one after
    # on the first stage.
    assert [rank["step_skipped"] for rank in ranks] == [[0, 1, 0, 0]] * 2
    assert [rank["finite"] for rank in ranks] == [True, True]
    assert len(ranks[1]["losses"]) == 4 * 8  # none was forwarded twice
    assert re.findall(r"skipped iterations: +(\d+)", output(folder, 1, "poisoned")) == list("0100")


def test_an_update_that_is_skipped_in_a_drain_counts_in_the_next_iteration(two):
    ranks = two[0]["poisoned-deferred"]
    assert [rank["step_skipped"] for rank in ranks] == [[0, 0, 1, 0]] * 2
    assert [rank["finite"] for rank in ranks] == [True, True]


# 12: low-precision weights that are cached


def test_the_first_forward_of_every_version_is_marked_not_that_of_an_iteration(two, four):
    for runs, name, num_stages, accumulation, total in (
        (two, "paci-masked", 2, 2, 16), (four, "paci-m2", 4, 1, 6), (four, "paci-m1", 4, 1, 6),
    ):
        for stage, rank in enumerate(runs[0][name]):
            schedule = StageSchedule(stage, num_stages, accumulation)
            versions = {schedule.version_at_forward(j) for j in range(total)}
            assert rank["first_marks"] == sorted(versions)


# 16: tied embeddings


@pytest.mark.parametrize("ranks", ["two", "four"])
@pytest.mark.parametrize("name", ["tied", "tied-sharded"])
def test_the_copies_of_a_tied_embedding_are_equal_whenever_the_stream_is_drained(
    ranks, name, request
):
    runs, _ = request.getfixturevalue(ranks)
    first, *_, last = runs[name]
    drains = [[entry["tied"] for entry in rank["drains"]] for rank in (first, last)]
    assert drains[0] == drains[1]
    assert None not in drains[0] and len(set(drains[0])) == 2  # after 2 and after 4 iterations
    assert [entry["why"] for entry in first["drains"]][:3] == ["evaluate", "evaluate", "save"]


@pytest.mark.parametrize("ranks, name", [("two", "tied"), ("four", "tied-sharded")])
def test_a_checkpoint_holds_one_tied_embedding_and_evaluates_to_the_same(ranks, name, request):
    runs, folder = request.getfixturevalue(ranks)
    tensors = checkpoint_tensors(folder / f"checkpoint-{name}")
    weights = [key for key in tensors if "optimizer" not in key and "embedding" in key]
    assert "embedding.word_embeddings.weight" in weights
    assert not any("output_layer.weight" in key for key in tensors)
    trained, loaded = runs[name][-1], runs["loaded"][-1]
    assert loaded["iteration_losses"] == []  # nothing was left to train
    assert loaded["evaluations"] == trained["evaluations"][2:] and loaded["evaluations"]


# 17: the log


def test_the_log_has_one_line_per_interval_from_the_last_rank(two):
    """As under 1F1B, an iteration that is skipped included, and without made-up values."""
    runs, folder = two
    pattern = r"iteration +(\d+)/.*consumed samples: +(\d+) .*lm loss: (\S+)"
    stock, paci = (
        [re.findall(pattern, output(folder, rank, name)) for rank in (0, 1)]
        for name in ("stock-logged", "paci-logged")
    )
    assert paci == stock and stock[0] == []
    assert [int(iteration) for iteration, *_ in stock[1]] == [1, 2, 6]
    assert "None" not in output(folder, 1, "paci-logged")
    # The last interval: iterations 3, 5 and 6 were trained.
    losses = [entry["lm loss"] for entry in runs["paci-logged"][1]["iteration_losses"]]
    assert len(losses) == 5
    assert float(stock[1][-1][2]) == pytest.approx(sum(losses[2:]) / 3, rel=1e-6)


# 18, 21, 22: drains, samples and states


def test_all_stages_are_at_the_same_point_at_every_drain(two):
    """Evaluation after every second iteration, right after resuming, and at the end."""
    runs, _ = two
    for name, expected in {
        "whole": [("evaluate", 2), ("save", 3), ("evaluate", 4), ("evaluate", 6), ("save", 6)],
        "stopped": [("evaluate", 2), ("save", 3)],
        "resumed": [("evaluate", 1), ("evaluate", 3), ("save", 3)],
    }.items():
        drains = [rank["drains"] for rank in runs[name]]
        keys = ("why", "iterations", "consumed")
        for first, last in zip(*drains, strict=True):
            assert [first[key] for key in keys] == [last[key] for key in keys]
        found = [(entry["why"], entry["iterations"]) for entry in drains[0]]
        assert found[: len(expected)] == expected
        assert all(entry[0] == "evaluate" for entry in found[len(expected):])
        for rank, entries in zip(runs[name], drains, strict=True):
            for entry in entries[: len(expected)]:
                done = entry["iterations"] * 8
                assert entry["counts"] == [done, done, done // 2]
            assert len(rank["iteration_losses"]) == entries[-1]["iterations"]


def test_every_sample_is_read_exactly_once_over_a_stop_and_a_resume(two):
    """What a checkpoint calls consumed has gone backward on every stage."""
    runs, _ = two
    for whole, stopped, resumed in zip(*(runs[n] for n in ("whole", "stopped", "resumed"))):
        assert whole["samples"] == stopped["samples"] + resumed["samples"] == list(range(96))
        before = 0
        for part in (stopped, resumed):
            for entry in part["drains"]:
                if entry["why"] == "save":
                    assert entry["consumed"] == before + entry["counts"][1] * SAMPLES
            before = part["drains"][-1]["consumed"]
        assert before == 96


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(two):
    runs, _ = two
    for whole, resumed in zip(runs["whole"], runs["resumed"], strict=True):
        assert resumed["iteration_losses"] == whole["iteration_losses"][3:]
        assert resumed["evaluations"] == whole["evaluations"][1:]
        for key in ("weights", "optimizer", "learning_rate"):
            assert resumed[key] == whole[key]


# 10, 25: timing


@pytest.mark.parametrize("ranks", ["two", "three", "four"])
def test_random_sleeps_hang_nothing_change_nothing_and_leave_no_handle(ranks, request):
    runs, _ = request.getfixturevalue(ranks)
    for first, *others in zip(*(runs[f"slowed-{seed}"] for seed in range(3)), strict=True):
        for other in others:
            for key in ("iteration_losses", "weights", "optimizer", "actions", "handles"):
                assert other[key] == first[key], key
        handles = first["handles"]
        assert handles["waited"] == handles["posted"] > 16


# 27: process groups


@pytest.mark.parametrize("ranks", ["two", "three", "four"])
def test_no_group_is_created_while_training_runs_and_all_ranks_create_the_same(ranks, request):
    runs, _ = request.getfixturevalue(ranks)
    for scenario in runs.values():
        assert all(rank["late_groups"] == [] for rank in scenario)
        assert len({json.dumps(rank["groups"]) for rank in scenario}) == 1
    assert len(runs["slowed-0"][0]["groups"]) > 10
