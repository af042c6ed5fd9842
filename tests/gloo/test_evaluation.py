"""Evaluation in the middle of an undrained stream.

Its losses are those of Megatron without the plugin that loads the weights of that moment, from a
run which is drained there by a checkpoint instead; and training goes on as it does there.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.gloo.launch import TINY_GPT, flags, launch
from tests.gloo.scenarios import OVERLAPS, TIED, replay_of

KEYS = ("losses", "weights", "optimizer", "learning_rate", "actions")
SCRIPT = "tests/gloo/validated_gpt.py"
NEVER = "--eval-interval 1000"
FULL = "--full-validation --eval-micro-batch-size 1 --eval-global-batch-size 1"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
SHARDED = " ".join(["--bf16 --use-distributed-optimizer", *OVERLAPS])


class Training(NamedTuple):
    ranks: int
    stages: int
    accumulation: int
    extra: str
    base: str
    interval: int
    """Iterations between evaluations."""
    count: int
    """Evaluations."""


class Evaluation(NamedTuple):
    training: str
    extra: str
    samples: int
    """Where the next evaluation goes on behind this one; 0 if it reads the same ones."""


TRAININGS = {
    # With four stages some evaluations come before the pipeline has filled.
    "n2": Training(2, 2, 2, DROPOUT, TINY_GPT, 2, 3),
    "n4-m1": Training(4, 4, 1, "--global-batch-size 2", TIED, 1, 3),
    "n4-m3": Training(4, 4, 3, f"--global-batch-size 6 {DROPOUT}", TINY_GPT, 2, 2),
    "sharded": Training(4, 2, 4, SHARDED, TINY_GPT, 2, 2),
}
EVALUATIONS = {
    "n2": Evaluation("n2", "--eval-iters 2", 32),
    "n4-m1": Evaluation("n4-m1", "--eval-iters 2", 4),
    "n4-m3": Evaluation("n4-m3", "--eval-iters 2", 12),
    "sharded": Evaluation("sharded", "--eval-iters 2", 32),
    "other-sizes": Evaluation(
        "n2", "--eval-iters 3 --eval-global-batch-size 5 --eval-micro-batch-size 1", 15
    ),
    # Megatron 0.19 fails on --full-validation with a single set, under its own schedule, too.
    "several": Evaluation("n2", f"{FULL} --multiple-validation-sets", 0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluation")


def run(name: str, extra: str, *, plugin: bool = True, **parameters) -> dict:
    training = TRAININGS[name]
    extra = f"{training.extra} --train-iters {training.interval * training.count} {extra}"
    if plugin:
        extra += f" --pipeline-schedule paci --paci-accum {training.accumulation}"
    arguments = flags(training.stages, extra, training.base)
    return {"script": SCRIPT, "arguments": arguments, "plugin": plugin, **parameters}


def without_evaluation(num_ranks: int, folder) -> dict[str, dict]:
    """Streams that are drained at the end alone, and by checkpoints."""
    scenarios = {}
    for name, training in TRAININGS.items():
        if training.ranks == num_ranks:
            scenarios[f"undrained-{name}"] = run(name, NEVER)
            scenarios[f"saved-{name}"] = run(
                name, f"{NEVER} --save-interval {training.interval} --save {folder / name}",
                save_initial=str(folder / f"{name}-initial"),
            )
    return scenarios


def with_evaluation(num_ranks: int, folder) -> dict[str, dict]:
    """The same with evaluations; and those of Megatron alone, from the checkpoints."""
    scenarios = {}
    for name, (training, extra, samples) in EVALUATIONS.items():
        interval = TRAININGS[training].interval
        if TRAININGS[training].ranks == num_ranks:
            scenarios[f"evaluated-{name}"] = run(training, f"{extra} --eval-interval {interval}")
            for index in range(TRAININGS[training].count):
                scenarios[f"stock-{name}-{index}"] = run(
                    training,
                    f"{extra} --first-sample {index * samples} --skip-train "
                    f"--load {folder / training} --ckpt-step {(index + 1) * interval}",
                    plugin=False,
                )
    return scenarios


@pytest.fixture(scope="module")
def runs(folder):
    none = run("n2", "--eval-interval 1 --eval-iters 0")
    found = {}
    for ranks, others in ((2, {"none": none}), (4, {})):
        scenarios = without_evaluation(ranks, folder) | with_evaluation(ranks, folder) | others
        found |= launch(ranks, scenarios, folder / str(ranks), seconds=300)
    return found


@pytest.fixture(scope="module")
def replay(folder, runs):
    training = TRAININGS["n4-m1"]
    scenario = replay_of(
        folder / "n4-m1-initial", f"{training.extra} --train-iters {training.count}",
        training.base, num_stages=4, streams=[[1, 1, 1]] * training.count,
    )
    return launch(1, {"replay": scenario}, folder / "replay", seconds=120)["replay"][0]


def number_of_sets(name: str) -> int:
    return 2 if name == "several" else 1


@pytest.mark.parametrize("name", EVALUATIONS)
def test_the_losses_are_those_of_megatron_with_the_same_weights(runs, name):
    count, sets = TRAININGS[EVALUATIONS[name].training].count, number_of_sets(name)
    found = runs[f"evaluated-{name}"][-1]["evaluations"]
    for index in range(count):
        stock = runs[f"stock-{name}-{index}"][-1]["evaluations"]
        assert found[index * sets:(index + 1) * sets] == stock[:sets]
        assert stock[0]["lm loss"] > 0
    assert found[-1] == stock[-1]  # after training, of the test set where there is one
    assert len({str(entry) for entry in found[: count * sets]}) == count * sets


@pytest.mark.parametrize("name", EVALUATIONS)
def test_training_goes_on_as_if_drained_by_a_checkpoint(runs, name):
    """Random states included, where there is dropout; whatever the sizes of evaluation are."""
    training = EVALUATIONS[name].training
    for saved, evaluated in zip(
        runs[f"saved-{training}"], runs[f"evaluated-{name}"], strict=True
    ):
        for key in KEYS:
            assert evaluated[key] == saved[key], key


def test_a_pipeline_that_never_fills_trains_as_its_replay(runs, replay):
    """Four stages drain after every single microbatch."""
    ranks = runs["evaluated-n4-m1"]
    assert ranks[-1]["losses"] == replay["losses"] and len(replay["losses"]) == 3
    assert [rank["weights"] for rank in ranks] == replay["weights"]


@pytest.mark.parametrize("name", TRAININGS)
def test_draining_makes_a_difference(runs, name):
    """Guards the oracles above."""
    undrained, saved = runs[f"undrained-{name}"], runs[f"saved-{name}"]
    assert undrained[0]["actions"] != saved[0]["actions"]
    assert undrained[0]["weights"] != saved[0]["weights"]


def test_without_iterations_of_evaluation_nothing_is_drained(runs):
    for undrained, none in zip(runs["undrained-n2"], runs["none"], strict=True):
        assert none["evaluations"] == []
        for key in KEYS:
            assert none[key] == undrained[key], key
