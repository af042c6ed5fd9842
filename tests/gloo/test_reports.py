"""What stages tell each other: clipping, token counts, invalid gradients, tied weights, the end.

Undrained runs are compared, to the last bit, with the replay (replay.py), which knows the
documented rules and shares no code with the plugin; drained ones with Megatron's own 1F1B.
"""

from __future__ import annotations

import math

import pytest

from tests.gloo.launch import TINY_GPT, RankError, flags, launch
from tests.gloo.scenarios import (
    EVERY,
    TIED,
    drained_pair,
    local_run,
    replay_of,
    variant_flags,
)

MASKED = "--calculate-per-token-loss"
ITERATIONS = 4
FORMATS = {  # of checkpoints; test_interchange.py has torch_dist
    "torch": "--ckpt-format torch",
    "torch-bf16": "--ckpt-format torch --bf16",
}

DRAINED = {
    "tied": ("", TIED),
    "tied-bf16": ("--bf16", TIED),
    "per-token": (MASKED, TINY_GPT),
    "tied-per-token": (MASKED, TIED),
    "fp16": ("--fp16 --initial-loss-scale 65536", TINY_GPT),
}
STREAMS = {
    # name: (accumulation, flags, base flags, what the replay has to know)
    "clipped-a1": (1, "--clip-grad 0.3", TINY_GPT, {}),
    "clipped-a4": (4, "--clip-grad 0.3", TINY_GPT, {}),
    "clipped-a8": (8, "--clip-grad 0.3", TINY_GPT, {}),
    "local-a2": (2, "--clip-grad 0.3 --paci-clip local", TINY_GPT, {"clip": "local"}),
    "tied-a1": (1, "--clip-grad 0", TIED, {}),
    "tied-a4": (4, "", TIED, {}),
    "per-token-a2": (2, MASKED, TIED, {}),
    "nan-a2": (2, "--clip-grad 0.5", TINY_GPT, {"poison": {"stage": 1, "microbatch": 9}}),
    "tied-a2-s1": (2, "--clip-grad 0.3", TIED, {"extra_in_flight": 1}),
    "per-token-a2-deferred": (2, MASKED, TIED, {"defer_step": True}),
    "nan-a1-deferred": (1, "--clip-grad 0.5", TINY_GPT, {
        "defer_step": True, "extra_in_flight": 1, "poison": {"stage": 1, "microbatch": 9},
    }),
}
# Drained with a deferred step, against the same 1F1B.
DEFERRED = ("tied-bf16", "tied-per-token", "fp16")

# megatron_paci.convergence, with all stages in one process.
IN_ONE_PROCESS = [
    (name, num_stages)
    for name in ("clipped-a1", "local-a2", "tied-a4") for num_stages in (2, 4)
]
CLIPPED = "--clip-grad 0.3"
LOCAL = {
    "1f1b": {"phases": [[4, 0]]},
    "start": {"phases": [[2, 0], [2, 2]]},
    "paci": {"phases": [[4, 1]]},
    "stashed": {"phases": [[4, 1]], "stash": True},
    "global": {"phases": [[4, 1]], "clip": "global"},
    "loose": {"phases": [[4, 1]], "extra": "--clip-grad 1e9"},
    "loose-global": {"phases": [[4, 1]], "clip": "global", "extra": "--clip-grad 1e9"},
    "drained": {"phases": [[4, 2]], "stop": {"iteration": 2, "anew": False}},
    "resumed": {"phases": [[4, 2]], "stop": {"iteration": 2, "anew": True}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reports")


def streams(num_stages: int, folder) -> dict[str, dict]:
    scenarios = {}
    for name, (accumulation, extra, base, rules) in STREAMS.items():
        poison = rules.get("poison")
        variant = variant_flags(rules.get("extra_in_flight", 0), rules.get("defer_step", False))
        paci = f"--pipeline-schedule paci --paci-accum {accumulation} {variant}"
        scenarios[name] = {
            "arguments": flags(num_stages, f"{paci} {extra}", base),
            "save_initial": str(folder / f"{name}-{num_stages}"),
            "poison": poison and {**poison, "where": "backward"},
        }
    return scenarios


def poisoned(num_stages: int) -> dict[str, dict]:
    """NaN in each pass of each stage; what the last stage's forward returns is the loss."""
    return {
        f"poisoned-{where}-{stage}": {
            "arguments": flags(num_stages, "--pipeline-schedule paci --paci-accum 4", TIED),
            "poison": {"stage": stage, "microbatch": 10, "where": where},
        }
        for stage in range(num_stages)
        for where in ("forward", "backward")
    }


@pytest.fixture(scope="module")
def two(folder):
    scenarios = streams(2, folder)
    for name, (extra, base) in DRAINED.items():
        scenarios |= drained_pair(name, 2, extra, base)
        if name in DEFERRED:
            paci = scenarios[f"paci-{name}"]["arguments"]
            scenarios[f"deferred-{name}"] = {"arguments": [*paci, "--paci-defer-step"]}
    scenarios |= poisoned(2)
    scenarios["overflow"] = {
        "arguments": flags(2, "--pipeline-schedule paci --paci-accum 4 --fp16 "
                              "--initial-loss-scale 8388608 --hysteresis 1")
    }
    overflowing = scenarios["overflow"]["arguments"]
    scenarios["overflow-deferred"] = {"arguments": [*overflowing, "--paci-defer-step"]}
    scenarios["overflow-drained"] = {
        "arguments": flags(2, "--eval-interval 1 --eval-iters 1 --pipeline-schedule paci --fp16 "
                              "--initial-loss-scale 4096 --hysteresis 1"),
        "poison": {"stage": 0, "microbatch": 3, "where": "backward"},
    }
    # Saved at iteration 2 and gone on; and stopped there and resumed. Before that the last stage
    # alone has taken an update.
    partial = {"poison": {"stage": 0, "microbatch": 2, "where": "backward"}}
    whole, parts = folder / "partial-whole", folder / "partial-parts"
    paci = "--pipeline-schedule paci --paci-accum 4 --save-interval 2"
    for name, extra, rules in (
        ("whole", f"--save {whole}", partial),
        ("first", f"--save {parts} --exit-interval 2", partial),
        ("second", f"--save {parts} --load {parts}", {}),
    ):
        scenarios[f"partial-{name}"] = {"arguments": flags(2, f"{paci} {extra}"), **rules}
    # The same checkpoint continued by either, and theirs by each other.
    save = "--save-interval 2 --exit-interval 2"
    for form in FORMATS:
        stock, ours = folder / f"stock-{form}", folder / f"ours-{form}"
        for name, extra in (
            ("stock-first", f"{save} --save {stock}"), ("stock-on-stock", f"--load {stock}"),
            ("paci-on-stock", f"--load {stock}"), ("paci-first", f"{save} --save {ours}"),
            ("stock-on-paci", f"--load {ours}"),
        ):
            paci = name.startswith("paci")
            extra += f" {FORMATS[form]}" + " --pipeline-schedule paci" * paci
            scenarios[f"{name}-{form}"] = {
                "arguments": flags(2, f"{EVERY} {extra}", TIED), "plugin": paci
            }
    scenarios["saved-often"] = {
        "arguments": flags(2, f"--pipeline-schedule paci --save {folder / 'often'} --train-iters 9 "
                              "--save-interval 1 --exit-signal-handler"),
        "stop": {"iteration": 2, "rank": 1, "how": "signal"},
    }
    scenarios["stock-clipped"] = {
        "arguments": flags(2, CLIPPED, TIED), "plugin": False,
        "save_initial": str(folder / "clipped"),
    }
    phases = "--pipeline-schedule paci --paci-accum-schedule sync:0,2:32"
    scenarios["phases"] = {"arguments": flags(2, f"{CLIPPED} {phases}", TIED)}
    return launch(2, scenarios, folder / "two", seconds=300)


@pytest.fixture(scope="module")
def four(folder):
    scenarios = streams(4, folder) | poisoned(4)
    scenarios |= drained_pair("tied", 4, "", TIED)
    long = "--pipeline-schedule paci --paci-accum 4 --train-iters 30 --exit-signal-handler "
    for name, how, rank, extra in (
        ("signal-first", "signal", 0, ""), ("signal-middle", "signal", 2, ""),
        ("signal-last", "signal", 3, ""),
        ("duration", "duration", 1, "--exit-duration-in-mins 30"),
    ):
        scenarios[name] = {
            "arguments": flags(4, long + extra),
            "stop": {"iteration": 3, "rank": rank, "how": how},
        }
    return launch(4, scenarios, folder / "four", seconds=400)


@pytest.fixture(scope="module")
def one(folder, two, four):
    scenarios = {}
    for name, (accumulation, extra, base, rules) in STREAMS.items():
        # The replay is started without the plugin's flags, under Megatron's own schedule.
        extra = extra.replace("--paci-clip local", "") + " --no-check-for-nan-in-loss-and-grad"
        for num_stages in (2, 4):
            scenarios[f"{name}-{num_stages}"] = replay_of(
                folder / f"{name}-{num_stages}", extra, base,
                num_stages=num_stages, accumulation=accumulation, **rules,
            )
    for name, num_stages in IN_ONE_PROCESS:
        accumulation, extra, base, rules = STREAMS[name]
        scenarios[f"local-{name}-{num_stages}"] = local_run(
            folder / f"{name}-{num_stages}", base, extra=extra.replace("--paci-clip local", ""),
            num_stages=num_stages, phases=[[ITERATIONS, accumulation]], **rules,
        )
    for name, rules in LOCAL.items():
        scenarios[f"local-{name}"] = local_run(
            folder / "clipped", TIED, num_stages=2, **{"extra": CLIPPED, **rules}
        )
    for name in ("loose", "loose-global"):  # drained where stages are behind the first one, too
        scenarios[f"local-{name}-4"] = local_run(
            folder / "clipped-a1-4", TINY_GPT, num_stages=4,
            stop={"iteration": 2, "anew": False}, **LOCAL[name],
        )
    scenarios["stashed"] = replay_of(
        folder / "clipped", CLIPPED, TIED, num_stages=2, accumulation=1, stash=True
    )
    return launch(1, scenarios, folder / "one", seconds=300)


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_equals_its_replay(two, four, one, name, num_stages):
    ranks, replay = (two if num_stages == 2 else four)[name], one[f"{name}-{num_stages}"][0]
    assert ranks[-1]["losses"] == replay["losses"] and len(replay["losses"]) == ITERATIONS
    assert [rank["weights"] for rank in ranks] == replay["weights"]
    assert [rank["skipped"] for rank in ranks] == replay["skipped"]


@pytest.mark.parametrize("name, num_stages", IN_ONE_PROCESS)
def test_all_stages_in_one_process_equal_the_distributed_run(two, four, one, name, num_stages):
    ranks, local = (two if num_stages == 2 else four)[name], one[f"local-{name}-{num_stages}"][0]
    assert ranks[-1]["losses"] == local["losses"] and len(local["losses"]) == ITERATIONS
    assert [rank["weights"] for rank in ranks] == local["weights"]


def test_1f1b_in_one_process_equals_megatron_clipping_and_tied_weights_included(two, one):
    ranks, [local] = two["stock-clipped"], one["local-1f1b"]
    assert ranks[-1]["losses"] == local["losses"] and len(local["losses"]) == ITERATIONS
    assert [rank["weights"] for rank in ranks] == local["weights"]


def test_in_one_process_a_synchronous_start_is_the_one_of_the_distributed_run(two, one):
    ranks, [start], [whole] = two["phases"], one["local-start"], one["local-1f1b"]
    assert ranks[-1]["losses"] == start["losses"] and len(start["losses"]) == ITERATIONS
    assert [rank["weights"] for rank in ranks] == start["weights"] != whole["weights"]
    assert start["losses"][:2] == whole["losses"][:2]


def test_in_one_process_a_resumed_run_equals_one_that_was_only_drained(one):
    [resumed], [drained] = one["local-resumed"], one["local-drained"]
    for key in ("losses", "weights", "optimizer"):
        assert resumed[key] == drained[key]


def test_in_one_process_stashed_weights_are_those_of_the_forward(one):
    [local], [replay], [plain] = one["local-stashed"], one["stashed"], one["local-paci"]
    assert (local["losses"], local["weights"]) == (replay["losses"], replay["weights"])
    assert local["weights"] != plain["weights"]


@pytest.mark.parametrize("stages", ["", "-4"])
def test_in_one_process_the_true_norm_changes_the_norm_alone(one, stages):
    """Waiting for it changes no order: where nothing is clipped, nothing changes."""
    for key in ("losses", "weights", "optimizer"):
        assert one[f"local-loose-global{stages}"][0][key] == one[f"local-loose{stages}"][0][key]
    assert one["local-global"][0]["losses"] != one["local-paci"][0]["losses"]


def test_clipping_and_its_rules_make_a_difference(two):
    weights = {name: two[name][0]["weights"] for name in STREAMS}
    assert len(set(weights.values())) == len(weights)


@pytest.mark.parametrize("name", DRAINED)
def test_drained_every_window_equals_1f1b(two, name):
    for stock, paci in zip(two[f"stock-{name}"], two[f"paci-{name}"]):
        for key in ("losses", "evaluations", "weights", "optimizer", "learning_rate"):
            assert paci[key] == stock[key]


@pytest.mark.parametrize("name", DEFERRED)
def test_drained_every_window_a_deferred_step_equals_1f1b(two, name):
    for stock, paci in zip(two[f"stock-{name}"], two[f"deferred-{name}"]):
        for key in ("losses", "evaluations", "weights", "optimizer", "learning_rate"):
            assert paci[key] == stock[key]


def test_tied_on_four_stages_equals_1f1b(four):
    for stock, paci in zip(four["stock-tied"], four["paci-tied"]):
        assert (paci["losses"], paci["weights"]) == (stock["losses"], stock["weights"])


def test_the_tied_copy_costs_no_memory(two):
    """The last stage saves the optimizer state of its copy; messages are no more than that."""
    first, last = zip(two["stock-tied"], two["paci-tied"])
    assert first[1]["bytes"] <= first[0]["bytes"] + 1024
    state = 2 * 256 * 64 * 4  # two fp32 tensors of the padded vocabulary times hidden size
    assert last[1]["bytes"] <= last[0]["bytes"] - state + 1024


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("num_stages, stage", [(2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_a_window_with_nan_is_left_out_where_it_can_be_known(two, four, num_stages, stage, where):
    ranks = (two if num_stages == 2 else four)[f"poisoned-{where}-{stage}"]
    assert all(rank["finite"] for rank in ranks)
    assert all(math.isfinite(entry["lm loss"]) for entry in ranks[-1]["losses"][2:])
    # After a NaN from a backward the later stages have stepped already.
    stepped = num_stages - 1 - stage if where == "backward" else 0
    assert [rank["skipped"] for rank in ranks] == [1] * (num_stages - stepped) + [0] * stepped
    assert [rank["partial"] for rank in ranks] == [0] * (num_stages - stepped) + [1] * stepped
    assert {rank["statistics"]["updates"] for rank in ranks} == {8}


def test_8_save_load_go_on_equals_not_stopping_after_a_partial_update_too(two):
    """A checkpoint stores one count of Adam's steps; the stages agree on it when they drain.

    The other cases are in test_resume.py.
    """
    assert [rank["partial"] for rank in two["partial-first"]] == [0, 1]
    for whole, part in zip(two["partial-whole"], two["partial-second"], strict=True):
        assert part["losses"] == whole["losses"][2:]
        assert (part["weights"], part["optimizer"]) == (whole["weights"], whole["optimizer"])


@pytest.mark.parametrize("form", FORMATS)
def test_checkpoints_go_from_1f1b_to_paci_and_back(two, form):
    """Tied weights: a checkpoint holds the copy's optimizer state and fp32 weight as well."""
    names = [f"{name}-{form}" for name in ("stock-on-stock", "paci-on-stock", "stock-on-paci")]
    for runs in zip(*(two[name] for name in names), strict=True):
        stock, *others = [
            [run[key] for key in ("losses", "weights", "optimizer", "learning_rate")]
            for run in runs
        ]
        assert len(stock[0]) == ITERATIONS - 2
        assert others == [stock, stock]


def test_an_overflow_is_known_at_the_next_drain(two):
    ranks = two["overflow-drained"]
    assert [rank["skipped"] for rank in ranks] == [1, 0]
    assert [rank["partial"] for rank in ranks] == [0, 1]
    assert {rank["loss_scale"] for rank in ranks} == {2048.0}


def test_a_signal_is_honoured_though_every_iteration_saves(two):
    assert {len(rank["losses"]) for rank in two["saved-often"]} <= {4, 5}


def test_abort_ends_training_with_the_reason(tmp_path):
    scenario = {
        "arguments": flags(2, "--pipeline-schedule paci --paci-nonfinite abort"),
        "poison": {"stage": 1, "microbatch": 10, "where": "forward"},
    }
    with pytest.raises(RankError, match="stage 1, window 1: the norm of the gradient is nan"):
        launch(2, {"abort": scenario}, tmp_path, seconds=120, fresh=True)


@pytest.mark.parametrize("name", ["overflow", "overflow-deferred"])
def test_an_fp16_overflow_lowers_the_scale_and_training_goes_on(two, name):
    ranks = two[name]
    assert all(rank["finite"] for rank in ranks)
    skipped = [rank["skipped"] for rank in ranks]
    assert 0 < skipped[0] < 8 and skipped[0] == skipped[1] + ranks[1]["partial"]


@pytest.mark.parametrize("name", ["signal-first", "signal-middle", "signal-last", "duration"])
def test_the_wish_of_one_stage_ends_all_at_the_same_iteration(four, name):
    iterations = {len(rank["losses"]) for rank in four[name]}
    assert len(iterations) == 1
    assert 4 <= iterations.pop() <= 3 + 3  # wished in the fourth, at most two more


def test_the_logged_norm_is_that_of_all_stages(four):
    """With one window per iteration all stages log the norm of the window before the last one."""
    first, last = four["clipped-a8"][0]["grad_norms"], four["clipped-a8"][3]["grad_norms"]
    assert first[0] is None and last[0] is None
    assert last[1:3] == pytest.approx(first[1:3], rel=1e-12)
