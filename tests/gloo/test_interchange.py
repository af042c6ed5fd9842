"""Checkpoints go between PACI and Megatron's schedules, other sizes and other windows.

Runs that are compared with 1F1B drain after every window; with equal weights they are 1F1B to the
last bit. Those of an undrained stream are compared with the replay (replay.py).
"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from megatron_paci.arguments import PaciArguments
from tests.gloo.checkpoints import checkpoint_values
from tests.gloo.launch import flags, launch
from tests.gloo.observed import checkpoint_tensors
from tests.gloo.scenarios import EVERY, TIED, replay_of

PACI = "--pipeline-schedule paci"
TENSOR = "--tensor-model-parallel-size 2"
CHUNKS = "--num-layers-per-virtual-pipeline-stage 1"
SAVED = "--ckpt-format torch_dist --save-interval 2"
SIZES = {
    # name: (ranks, stages, flags)
    "n1": (1, 1, ""),
    "n2": (2, 2, ""),
    "n4": (4, 4, ""),
    "n2t2": (4, 2, TENSOR),
}
READINGS = [
    # sizes that a checkpoint is written at and read at, and flags of both
    ("n2", "n4", ""), ("n2", "n1", ""), ("n4", "n2", "--bf16"), ("n2", "n2t2", ""),
    ("n2t2", "n2", "--bf16"),
]
# As a user's command line has it; PACI turns the rerun state machine off by itself.
DEFAULT_RERUN = TIED.replace("--rerun-mode disabled ", "")
MODEL_FLAGS = ("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
               "--max-position-embeddings 32 ")
LOADINGS = {
    # name: (flags, base)
    "plain": ("", DEFAULT_RERUN),
    "arguments": ("--use-checkpoint-args", DEFAULT_RERUN.replace(MODEL_FLAGS, "")),
    "finetune": ("--finetune --train-iters 2", DEFAULT_RERUN),
    "weights": ("--no-load-optim", DEFAULT_RERUN),
}
PARTS = {
    # name: (flags of the first two iterations, of the last two, the streams of both for the replay)
    "a2-a8": (f"{PACI} --paci-accum 2", f"{PACI} --paci-accum 8", [[2, 8, 2], [2, 8, 8]]),
    "a8-a1": (f"{PACI} --paci-accum 8", f"{PACI} --paci-accum 1", [[2, 8, 8], [2, 8, 1]]),
    "1f1b-a2": ("", f"{PACI} --paci-accum 2", [[1, 8, 8], [1, 8, 8], [2, 8, 2]]),
    "a2-1f1b": (f"{PACI} --paci-accum 2", "", [[2, 8, 2], [1, 8, 8], [1, 8, 8]]),
    # Sizes of a batch by consumed tokens: here the default window, all microbatches, grows as well.
    "growing": (f"{PACI} --step-batch-size-schedule 0:8,512:16",
                f"{PACI} --step-batch-size-schedule 0:8,512:16", [[2, 4, 4], [2, 8, 8]]),
}
OWN_ARGUMENTS = {
    f"args/{name}"
    for name in ("save", "check_for_nan_in_loss_and_grad", *(f.name for f in fields(PaciArguments)))
}
GROWING = TIED.replace("--global-batch-size 16 ", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("interchange")


def drained(num_stages: int, extra: str, base: str = TIED) -> dict:
    return {
        "arguments": flags(num_stages, f"{EVERY} {SAVED} {extra}", base), "plugin": PACI in extra
    }


def written(size: str, extra: str) -> str:
    return f"{size}{extra.replace(' ', '')}"


def writers(num_ranks: int, folder) -> dict[str, dict]:
    """Two iterations and a checkpoint, by either schedule, at the sizes of so many ranks."""
    scenarios = {}
    for size, _, extra in READINGS:
        ranks, stages, own = SIZES[size]
        if ranks == num_ranks:
            for name, schedule in (("stock", ""), ("paci", PACI)):
                name = f"{name}-{written(size, extra)}"
                scenarios[name] = drained(
                    stages, f"{own} {extra} {schedule} --exit-interval 2 --save {folder / name}"
                )
    return scenarios


def readers(num_ranks: int, folder) -> dict[str, dict]:
    """Two iterations more at other sizes."""
    scenarios = {}
    for size, other, extra in READINGS:
        ranks, stages, own = SIZES[other]
        if ranks == num_ranks:
            for name, schedule, source in (
                ("stock-on-stock", "", "stock"), ("paci-on-stock", PACI, "stock"),
                ("stock-on-paci", "", "paci"),
            ):
                load = f"--load {folder / source}-{written(size, extra)}"
                scenarios[f"{name}-{size}-{other}"] = drained(
                    stages, f"{own} {extra} {schedule} {load}"
                )
    return scenarios


def interleaved(folder) -> dict[str, dict]:
    """Two chunks of a layer on each rank; all of them save again at the end."""
    scenarios = {
        "chunks": drained(2, f"{CHUNKS} --exit-interval 2 --save {folder / 'chunks'}"),
    }
    for name, schedule, source in (
        ("chunks-on-chunks", CHUNKS, "chunks"), ("paci-on-chunks", PACI, "chunks"),
        ("chunks-on-paci", CHUNKS, "paci-n2"), ("paci-on-paci", PACI, "paci-n2"),
    ):
        scenarios[name] = drained(
            2, f"{schedule} --load {folder / source} --save {folder / name}"
        )
    return scenarios


def loadings(folder) -> dict[str, dict]:
    scenarios = {}
    for name, schedule in (("stock", ""), ("paci", PACI)):
        scenarios[f"{name}-default"] = drained(
            2, f"{schedule} --exit-interval 2 --save {folder / name}-default", DEFAULT_RERUN
        )
    for name, (extra, base) in LOADINGS.items():
        for reader, schedule, source in (
            ("stock-on-stock", "", "stock"), ("stock-on-paci", "", "paci"),
            ("paci-on-stock", PACI, "stock"),
        ):
            scenarios[f"{reader}-{name}"] = drained(
                2, f"{extra} {schedule} --load {folder / source}-default", base
            )
    return scenarios


def parts(folder) -> dict[str, dict]:
    scenarios = {}
    for name, (first, second, _) in PARTS.items():
        base = GROWING if name == "growing" else TIED
        for part, schedule, extra in (
            ("first", first, f"--exit-interval 2 --save {folder / name}"),
            ("second", second, f"--load {folder / name}"),
        ):
            # Clipping is off: what PACI clips with is not what 1F1B does.
            drains = "--clip-grad 0" + (f" {EVERY}" if PACI not in schedule else "")
            scenarios[f"{part}-{name}"] = {
                "arguments": flags(2, f"{SAVED} {schedule} {drains} {extra}", base),
                "plugin": PACI in schedule,
                "save_initial": str(folder / f"{part}-{name}-initial"),
            }
    scenarios["whole-growing"] = {
        "arguments": flags(2, f"{PARTS['growing'][0]} --clip-grad 0", GROWING)
    }
    return scenarios


@pytest.fixture(scope="module")
def runs(folder):
    """One launch after another, since a checkpoint is read at sizes that follow."""
    scenarios = writers(2, folder) | interleaved(folder) | loadings(folder) | parts(folder)
    found = launch(2, scenarios, folder / "two", seconds=300)
    found |= launch(4, writers(4, folder) | readers(4, folder), folder / "four", seconds=300)
    found |= launch(2, readers(2, folder), folder / "two-again", seconds=300)
    return found | launch(1, readers(1, folder), folder / "one", seconds=300)


@pytest.fixture(scope="module")
def replays(folder, runs):
    scenarios = {}
    for name, (first, _, streams) in PARTS.items():
        grows = name == "growing"
        extra = f"--clip-grad 0 {first.replace(PACI, '') if grows else ''}"
        scenarios[name] = replay_of(
            folder / f"first-{name}-initial", extra, GROWING if grows else TIED, streams=streams
        )
    return launch(1, scenarios, folder / "replays", seconds=200)


def outcome(ranks: list[dict]) -> list:
    names = ("losses", "evaluations", "weights", "optimizer", "learning_rate")
    return [[rank[name] for name in names] for rank in ranks]


def assert_same_tensors(folder, one: str, other: str) -> None:
    first, second = (checkpoint_tensors(folder / name) for name in (one, other))
    assert first.keys() == second.keys() and len(first) > 40
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def differing(folder, one: str, other: str) -> set[str]:
    """Return the paths of all values besides tensors that two checkpoints do not share."""
    first, second = (checkpoint_values(folder / name) for name in (one, other))
    absent = object()
    return {
        name for name in first.keys() | second.keys()
        if first.get(name, absent) != second.get(name, absent)
    }


@pytest.mark.parametrize("name", dict.fromkeys(written(w, e) for w, _, e in READINGS))
def test_a_checkpoint_is_the_one_that_1f1b_writes(runs, folder, name):
    """Every tensor and every other value but the plugin's own flags and what it turns off."""
    assert_same_tensors(folder, f"stock-{name}", f"paci-{name}")
    assert differing(folder, f"stock-{name}", f"paci-{name}") == OWN_ARGUMENTS


def test_a_checkpoint_lacks_the_state_of_the_rerun_machine_that_paci_turns_off(runs, folder):
    """By default 1F1B stores it; it goes on from a checkpoint without one, see below."""
    assert_same_tensors(folder, "stock-default", "paci-default")
    found = differing(folder, "stock-default", "paci-default")
    of_machine = {name for name in found if name.startswith("rerun_state_machine")}
    assert of_machine & checkpoint_values(folder / "stock-default").keys() == of_machine
    assert not of_machine & checkpoint_values(folder / "paci-default").keys() and of_machine
    assert found - of_machine == OWN_ARGUMENTS | {"args/rerun_mode"}


@pytest.mark.parametrize("size, other", [reading[:2] for reading in READINGS])
def test_a_checkpoint_continues_at_other_sizes(runs, size, other):
    names = [f"{name}-{size}-{other}" for name in ("stock-on-stock", "paci-on-stock")]
    stock, paci = (outcome(runs[name]) for name in names)
    assert paci == stock == outcome(runs[f"stock-on-paci-{size}-{other}"])
    assert len(stock[-1][0]) == 2 and stock[-1][0][0]
    assert runs[names[1]][0]["statistics"]["updates"] == 2


def test_checkpoints_go_between_paci_and_interleaved_1f1b(runs, folder):
    """Ranks hold other layers then, so what is compared are the checkpoints at the end."""
    for source in ("chunks", "paci"):
        names = [f"{schedule}-on-{source}" for schedule in ("chunks", "paci")]
        assert_same_tensors(folder, *names)
        chunks, paci = (runs[name][-1] for name in names)
        assert paci["losses"] == chunks["losses"] and len(paci["losses"]) == 2
        assert paci["evaluations"] == chunks["evaluations"]
        assert {name for name in differing(folder, *names) if not name.startswith("args/")} == set()


@pytest.mark.parametrize("name", LOADINGS)
def test_megatron_loads_what_paci_wrote_and_paci_what_megatron_wrote(runs, name):
    """Megatron without the plugin; with the flags that change what is taken from a checkpoint."""
    stock, *others = (
        outcome(runs[f"{reader}-{name}"])
        for reader in ("stock-on-stock", "stock-on-paci", "paci-on-stock")
    )
    assert others == [stock] * 2
    assert len(stock[-1][0]) == 2


def test_the_flags_of_loading_make_a_difference(runs):
    """Guards the test above."""
    losses = {
        name: [entry["lm loss"] for entry in runs[f"stock-on-stock-{name}"][1]["losses"]]
        for name in LOADINGS
    }
    assert losses["plain"] == losses["arguments"]
    assert losses["plain"][0] == losses["weights"][0] and losses["plain"] != losses["weights"]
    assert losses["finetune"][0] not in losses["plain"]  # it reads the first samples again


@pytest.mark.parametrize("name", PARTS)
def test_windows_and_schedules_change_at_a_checkpoint(runs, replays, name):
    """Undrained streams: what goes on is what the replay does that changes its rules there."""
    first, second, replay = runs[f"first-{name}"], runs[f"second-{name}"], replays[name][0]
    assert first[-1]["losses"] + second[-1]["losses"] == replay["losses"]
    assert len(replay["losses"]) == 4
    assert [rank["weights"] for rank in second] == replay["weights"]
    if name != "a2-1f1b":  # the last stage of 1F1B keeps an optimizer state of its tied weight
        assert [rank["optimizer"] for rank in second][0] == replay["optimizer"][0]


def test_a_window_of_all_microbatches_grows_with_them(runs):
    """The same as after a checkpoint at that point."""
    for whole, second in zip(runs["whole-growing"], runs["second-growing"], strict=True):
        for key in ("weights", "optimizer", "learning_rate"):
            assert whole[key] == second[key]
        assert whole["losses"][2:] == second["losses"]
        assert whole["statistics"]["updates"] == 4
