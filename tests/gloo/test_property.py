"""The invariants of docs/design.md for drawn combinations of what is supported.

Every draw trains a tiny GPT four times: with Megatron's own 1F1B, with PACI drained after every
window, and twice with PACI undrained. ``make test`` draws a few, always the same;
``make property EXAMPLES=200`` draws as many new ones and prints what they covered. A draw that
failed once stays as a named case.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, example, given, settings

from megatron_paci.schedule import StageSchedule
from tests.gloo.draws import HIDDEN, ITERATIONS, SEQUENCE, Setup, setups, supported
from tests.gloo.pool import RankPool

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "0"))

# Draws that failed once (none so far), and what ``make test`` is to cover whatever it draws.
NAMED_CASES = {
    "everything overlapped": Setup(
        replicas=2, microbatches=3, accumulation=1, reduction="sharded-overlaps", precision="bf16",
        clip="pipelined", dropout=0.1,
    ),
    "more in flight, deferred steps": Setup(
        replicas=2, microbatches=4, accumulation=1, extra_in_flight=1, defer_step=True,
        reduction="overlap", precision="fp16-dynamic", tied=True, clip="pipelined", per_token=True,
    ),
    "sequence parallel, recomputed": Setup(
        tensor=2, accumulation=1, sequence_parallel=True, recompute="uniform", dropout=0.1,
        layers="layout", architecture=("gqa", "rmsnorm", "rope", "swiglu"),
    ),
}


class Coverage:
    """The draws that passed, and how often each value occurred in them."""

    def __init__(self):
        self.passed: list[Setup] = []

    def add(self, setup: Setup) -> None:
        self.passed.append(setup)
        if EXAMPLES:
            print(f"{len(self.passed)} passed: {setup}", flush=True)

    def __str__(self) -> str:
        lines = [f"{len(self.passed)} draws passed"]
        for field in fields(Setup):
            values = [getattr(setup, field.name) for setup in self.passed]
            if field.name == "architecture":
                values = [part for value in values for part in value or ("gpt",)]
            counts = " | ".join(f"{value}: {n}" for value, n in sorted(Counter(values).items()))
            lines += [f"  {field.name}  {counts}"] if field.name != "seed" else []
        return "\n".join(lines)


@pytest.fixture(scope="module")
def coverage():
    found = Coverage()
    yield found
    print(f"\n{found}")


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    ranks = RankPool(tmp_path_factory.mktemp("property"))
    yield ranks
    ranks.close()


def with_named_cases(test):
    for name, setup in NAMED_CASES.items():
        test = example(setup=setup).via(name)(test)
    return test


@with_named_cases
@given(setup=setups().filter(supported))
@settings(
    max_examples=EXAMPLES or 3,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_the_invariants_hold(pool, coverage, setup):
    runs = pool.run(setup.world_size, setup.runs(), seconds=240)
    check_1_2_order_drift_and_queue(setup, runs["stream"])
    check_2_no_copy_of_the_weights(setup, runs["stock"], runs["drained"])
    check_3_no_collective_over_stages(runs["stream"])
    check_4_drained_equals_1f1b(setup, runs["stock"], runs["drained"])
    check_7_timing_changes_nothing(runs["stream"], runs["again"])
    check_replicas_are_equal(setup, runs["stream"])
    coverage.add(setup)


def check_1_2_order_drift_and_queue(setup: Setup, stream: list[dict]) -> None:
    total = setup.microbatches * ITERATIONS
    for rank, seen in enumerate(stream):
        schedule = StageSchedule(
            setup.stage_of(rank), setup.stages, setup.accumulation, setup.extra_in_flight,
            setup.defer_step,
        )
        assert seen["actions"] == [str(action) for action in schedule.finite(total)]
        drifts = [schedule.drift(j) for j in range(total)]
        statistics = seen["statistics"]
        assert statistics["drift_counts"] == {str(d): drifts.count(d) for d in sorted(set(drifts))}
        assert statistics["drift_max"] <= schedule.drift_bound
        assert statistics["in_flight_max"] == min(schedule.depth, total)


def check_2_no_copy_of_the_weights(setup: Setup, stock: list[dict], drained: list[dict]) -> None:
    """What is alive after training is less than three messages more; a layer is 12 times one."""
    message = SEQUENCE * setup.micro_batch_size * HIDDEN * 4
    for one, other in zip(stock, drained):
        assert other["bytes"] - one["bytes"] < 3 * message


def check_3_no_collective_over_stages(stream: list[dict]) -> None:
    assert [seen["across_stages"] for seen in stream] == [[]] * len(stream)


def check_4_drained_equals_1f1b(setup: Setup, stock: list[dict], drained: list[dict]) -> None:
    names = ["losses", "evaluations", "weights", "buffers", "learning_rate", "loss_scale",
             "optimizer"]
    for rank, (one, other) in enumerate(zip(stock, drained)):
        assert len(one["losses"]) == len(one["evaluations"]) - 2 == ITERATIONS
        for name in names:
            assert (rank, name, other[name]) == (rank, name, one[name])


def check_7_timing_changes_nothing(stream: list[dict], again: list[dict]) -> None:
    names = ["actions", "losses", "evaluations", "grad_norms", "weights", "optimizer",
             "learning_rate", "loss_scale", "skipped", "partial", "statistics"]
    for rank, (one, other) in enumerate(zip(stream, again)):
        for name in names:
            assert (rank, name, other[name]) == (rank, name, one[name])


def check_replicas_are_equal(setup: Setup, stream: list[dict]) -> None:
    """Ranks of a stage are numbered replica by replica; each replica has experts of its own."""
    if setup.model.startswith("expert") and setup.replicas > 1:
        return
    for rank, seen in enumerate(stream):
        first = setup.stage_of(rank) * setup.ranks_of_a_stage + rank % setup.tensor
        assert (rank, seen["weights"]) == (rank, stream[first]["weights"])
