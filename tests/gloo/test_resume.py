"""A run that is stopped and resumed equals one that was not, with Megatron's own checkpoints.

Dropout is on, the gradients are clipped by a norm that comes along the pipeline, and the stream is
drained where it has to be and nowhere else: every 4 iterations to evaluate, at 10 and 20 to save.
Whoever is compared is drained at the same iterations. Comparisons are to the last bit.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from megatron_paci.compare.plan import make_plan
from megatron_paci.compare.records import read_records, run_figures
from megatron_paci.compare.short import make_short
from tests.gloo.launch import flags
from tests.gloo.observed import PACI, SCRIPT, Launches
from tests.gloo.scenarios import OVERLAPS, TIED
from tests.gloo.torchrun import ROOT

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --vocab-size 127 --micro-batch-size 1 --global-batch-size 8 "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --clip-grad 0.3 --train-iters 20 "
    f"--eval-interval 4 --eval-iters 1 --save-interval 10 {PACI} 4"
)
SHARDED = "--use-distributed-optimizer"
OVERLAPPING = f"{SHARDED} {' '.join(OVERLAPS)}"
RESHARDABLE = f"{SHARDED} --dist-ckpt-optim-fully-reshardable"
# On two stages: a run without a stop, and what is added to it where it is stopped and resumed.
TWO = {
    "tied": ("", {"tied": "--ckpt-format torch_dist", "torch": "--ckpt-format torch"}),
    "sharded": (OVERLAPPING, {"sharded": "", "sharded-torch": "--ckpt-format torch"}),
    "bf16": (f"{SHARDED} --bf16", {"bf16-torch": "--ckpt-format torch"}),
    # Megatron's own code spoils this format where a bucket is padded: not at this size.
    "whole-buckets": (f"{SHARDED} --hidden-size 128", {"reshardable": RESHARDABLE}),
}
FOUR = {
    "replicas": (f"{OVERLAPPING} --global-batch-size 16", {"replicas": ""}),
    "tensors": ("--tensor-model-parallel-size 2", {"tensors-torch": "--ckpt-format torch"}),
    "deferred": (
        "--overlap-grad-reduce --global-batch-size 16 --paci-defer-step --paci-extra-in-flight 1",
        {"deferred": ""},
    ),
}
STOPPED = [
    (ranks, whole, name)
    for ranks, variants in (("two", TWO), ("four", FOUR))
    for whole, (_, parts) in variants.items()
    for name in parts
]
SAME = ("weights", "buffers", "optimizer", "learning_rate")


def has_flag(name: str) -> bool:
    """Whether this Megatron has a flag for its checkpoints, without importing it."""
    for folder in importlib.util.find_spec("megatron").submodule_search_locations:
        source = Path(folder) / "training/config/training_config.py"
        if source.exists():
            return f"    {name}:" in source.read_text()
    return False


# Before 0.19 the only process that writes in the background is that of a package for GPUs.
ASYNC = has_flag("async_strategy")


def add_variants(launches: Launches, variants: dict) -> None:
    """Train without a stop; and stop at 10, then resume, in every format."""
    folder = launches.folder
    for whole, (extra, formats) in variants.items():
        command = f"{SMALL} {extra}"
        launches.add(f"{whole}-whole", f"{command} --save {folder / whole}", TIED, stages=2)
        for name, form in formats.items():
            parts = f"{command} {form} --save {folder}/{name}-parts"
            launches.add(f"{name}-stopped", f"{parts} --exit-interval 10", TIED, stages=2)
            resumed = f"{command} {form} --load {folder}/{name}-parts --save {folder}/{name}-on"
            launches.add(f"{name}-resumed", resumed, TIED, stages=2)


def add_short_comparison(launches: Launches, parts: Path) -> None:
    """Add the runs of ``compare --short`` from iteration 10 on, as its plan has them."""
    (parts / "latest_checkpointed_iteration.txt").write_text("10")  # as it will be by then
    stock = SMALL.replace(f"{PACI} 4", "")
    given = flags(2, f"{stock} --load {parts} --save {launches.folder / 'short-saved'}", TIED)
    short, arguments = make_short(given, iterations=4)
    plan = make_plan(str(ROOT / SCRIPT), arguments, output=launches.folder / "short", num_ranks=2,
                     device="cpu", schedules=["1f1b", "paci"], accum=[4], trace=False, short=short)
    for run in plan.runs:
        words = run.command[run.command.index(plan.script) + 1:]
        launches.add(f"short-{run.schedule}", " ".join(words), "")
    launches.add("short-stock", f"{stock} --load {parts}", TIED)


def leave_interrupted_save(folder: Path) -> None:
    """Put there what a save that did not come to its end may have left."""
    folder.mkdir(parents=True)
    for file in ("__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json"):
        (folder / file).write_text("half a file")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    launches = Launches(2, tmp_path_factory.mktemp("two"))
    folder = launches.folder

    def add(name: str, extra: str, **parameters) -> None:
        launches.add(name, f"{SMALL} {extra}", TIED, **parameters)

    add_variants(launches, TWO)
    parts = folder / "tied-parts"
    leave_interrupted_save(parts / "iter_0000016")
    add_short_comparison(launches, parts)
    add("other-interval", f"--load {parts} --save {folder / 'other'} --save-interval 4")
    add("second", f"--load {parts} --save {parts} --exit-interval 16")
    add("third", f"--load {parts} --save {folder / 'third'}")
    # In every stream the fourth window, in the second iteration after a drain: so the last one
    # before the checkpoint. At the forward of the first stage, so both leave it out.
    poison = {"stage": 0, "microbatch": 14, "where": "forward"}
    add("skipped-whole", f"--save {folder / 'skipped-whole'}", poison=poison)
    add("skipped-stopped", f"--save {folder / 'skipped'} --exit-interval 10", poison=poison)
    add("skipped-resumed", f"--load {folder / 'skipped'} --save {folder / 'skipped-on'}",
        poison=poison)
    add("timed", f"--save {folder / 'timed'} --exit-duration-in-mins 30",
        stop={"iteration": 7, "rank": 1, "how": "duration"})
    add("timed-resumed", f"--load {folder / 'timed'} --save {folder / 'timed-on'}")
    if ASYNC:
        add("async-whole", f"{OVERLAPPING} --save {folder / 'async'} --async-save "
            "--use-persistent-ckpt-worker --async-strategy mcore")
        # From the checkpoint that was written while training went on.
        add("async-resumed", f"{OVERLAPPING} --load {folder / 'async'} --ckpt-step 10 "
            f"--save {folder / 'async-on'}")
    for name, extra in (("finished", f"--save {folder / 'finished'}"), ("tested", "--skip-train")):
        add(name, f"--load {folder / 'tied'} {extra}")
        stock = f"{SMALL.replace(f'{PACI} 4', '')} --load {folder / 'tied'} {extra}"
        launches.add(f"{name}-stock", stock.replace("/finished", "/finished-stock"), TIED)
    return launches.run(seconds=300), folder


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    launches = Launches(4, tmp_path_factory.mktemp("four"))
    add_variants(launches, FOUR)
    return launches.run(seconds=300), launches.folder


def assert_goes_on(whole: list[dict], resumed: list[dict], begin: int = 10) -> None:
    """Assert that ``resumed`` is what ``whole`` did after iteration ``begin``."""
    for one, other in zip(whole, resumed, strict=True):
        assert other["iteration_losses"] == one["iteration_losses"][begin:]
        assert len(one["iteration_losses"]) == 20
        assert other["evaluations"] == one["evaluations"][begin // 4 :]
        for key in SAME:
            assert other[key] == one[key], key


def saved_iteration(folder: Path) -> int:
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


def assert_parts_make_a_whole(whole: list[dict], *parts: list[dict]) -> None:
    """Assert that losses and the samples read, put together, are those of ``whole``."""
    for one, *others in zip(whole, *parts, strict=True):
        for key in ("iteration_losses", "samples"):
            assert sum((other[key] for other in others), []) == one[key]


@pytest.mark.parametrize("ranks, whole, name", STOPPED)
def test_8_a_stopped_and_resumed_run_equals_one_that_was_not_stopped(ranks, whole, name, request):
    runs, folder = request.getfixturevalue(ranks)
    whole, stopped, resumed = (
        runs[each] for each in (f"{whole}-whole", f"{name}-stopped", f"{name}-resumed")
    )
    assert {len(rank["iteration_losses"]) for rank in stopped} == {10}
    assert_goes_on(whole, resumed)
    assert_parts_make_a_whole(whole, stopped, resumed)
    assert saved_iteration(folder / f"{name}-on") == 20


@pytest.mark.parametrize("whole", TWO)
def test_every_sample_is_read_once_and_in_order(two, whole):
    for rank in two[0][f"{whole}-whole"]:
        assert rank["samples"] == list(range(20 * 8))


def test_a_run_in_three_parts_over_an_interrupted_save_equals_the_whole_one(two):
    """The folder of iteration 16 holds rubbish at first: the tracker says what is complete."""
    runs, folder = two
    parts = [runs[name] for name in ("tied-stopped", "second", "third")]
    assert [len(part[0]["iteration_losses"]) for part in parts] == [10, 6, 4]
    assert_goes_on(runs["tied-whole"], runs["third"], begin=16)
    assert_parts_make_a_whole(runs["tied-whole"], *parts)
    assert saved_iteration(folder / "tied-parts") == 16


def test_another_interval_of_saving_changes_nothing_where_it_drains_no_more(two):
    runs, folder = two
    assert_goes_on(runs["tied-whole"], runs["other-interval"])
    saved = sorted(each.name for each in (folder / "other").glob("iter_*"))
    assert saved == ["iter_0000012", "iter_0000016", "iter_0000020"]


def test_a_run_goes_on_after_a_window_that_was_skipped_right_before_the_checkpoint(two):
    runs, _ = two
    whole, stopped, resumed = (runs[f"skipped-{part}"] for part in ("whole", "stopped", "resumed"))
    assert_goes_on(whole, resumed)
    assert [[rank["skipped"] for rank in run] for run in (whole, stopped, resumed)] == [
        [6, 6], [3, 3], [3, 3]
    ]
    assert stopped[1]["step_skipped"][-1] == 1  # the first stage skips it while it drains
    assert whole[0]["weights"] != runs["tied-whole"][0]["weights"]


def test_a_short_comparison_goes_on_as_the_run_itself_would(two):
    """The same weights, moments, learning rate and samples, to the last bit; nothing is saved."""
    runs, folder = two
    records = {name: run_figures(read_records(folder / "short/runs" / name / "record"))
               for name in ("1f1b", "paci-a4")}
    for name, whole in (("1f1b", runs["short-stock"][1]["iteration_losses"]),
                        ("paci-a4", runs["tied-whole"][1]["iteration_losses"][10:])):
        assert records[name]["loss"] == [entry["lm loss"] for entry in whole[:4]]
        assert len(whole) == 10
    for schedule in ("1f1b", "paci"):
        assert runs[f"short-{schedule}"][0]["samples"] == list(range(80, 112))
    assert records["1f1b"]["loss"] != records["paci-a4"]["loss"]
    assert records["paci-a4"]["drift_max"] == [1, 0]
    assert not (folder / "short-saved").exists() and not list((folder / "short").rglob("*save*"))


def test_ending_by_time_saves_where_it_drains_and_goes_on_from_there(two):
    """One rank's time is up in iteration 8, after which the whole run drains as well."""
    runs, folder = two
    assert {len(rank["iteration_losses"]) for rank in runs["timed"]} == {8}
    assert_goes_on(runs["tied-whole"], runs["timed-resumed"], begin=8)
    assert saved_iteration(folder / "timed") == 8


def test_a_finished_run_that_is_resumed_trains_nothing_and_saves_nothing(two):
    runs, folder = two
    for whole, finished in zip(runs["tied-whole"], runs["finished"], strict=True):
        assert finished["iteration_losses"] == finished["samples"] == []
        for key in ("weights", "buffers"):
            assert finished[key] == whole[key]
    assert not list((folder / "finished").glob("iter_*"))


@pytest.mark.parametrize("name", ["tied-whole", "finished", "tested"])
def test_last_evaluations_are_those_of_megatron_with_the_same_checkpoint(two, name):
    """On the validation and on the test set: after training, and with --skip-train."""
    stock = two[0]["tested-stock" if name == "tested" else "finished-stock"]
    for paci, other in zip(two[0][name], stock, strict=True):
        assert paci["evaluations"][-2:] == other["evaluations"]
    assert len({entry["lm loss"] for entry in stock[-1]["evaluations"]}) == 2


@pytest.mark.skipif(not ASYNC, reason="this Megatron writes asynchronously on GPUs alone")
def test_what_is_written_while_training_goes_on_is_the_state_of_that_iteration(two):
    runs, folder = two
    assert_goes_on(runs["sharded-whole"], runs["async-whole"], begin=0)
    assert_goes_on(runs["sharded-whole"], runs["async-resumed"])
    assert saved_iteration(folder / "async") == 20


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_a_checkpoint_counts_as_complete_only_when_it_is(ranks, request):
    """The tracker file names a checkpoint after all of its files are written, not before."""
    runs, folder = request.getfixturevalue(ranks)
    trackers = list(folder.glob("*/latest_checkpointed_iteration.txt"))
    assert len(trackers) >= 5
    for tracker in trackers:
        newest = tracker.parent / f"iter_{saved_iteration(tracker.parent):07d}"
        files = [file for file in newest.rglob("*") if file.is_file()]
        assert files
        assert max(file.stat().st_mtime_ns for file in files) <= tracker.stat().st_mtime_ns
    for name in (f"{whole}-whole" for whole in (TWO if ranks == "two" else FOUR)):
        for rank in runs[name]:
            tracked = [drain["tracked"] for drain in rank["drains"] if drain["why"] == "save"]
            assert tracked == [None, 10]
