"""megatron_paci/compare --short: its plan, its test of two loss curves, and what it says."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from megatron_paci.__main__ import main
from megatron_paci.compare import command, report
from megatron_paci.compare.gap import gap, gap_over_seeds
from megatron_paci.compare.plan import Plan
from megatron_paci.compare.short import Short, iterations_done, make_short, take_out
from megatron_paci.compare.short_verdict import short_verdict
from megatron_paci.student import interval, percentile
from tests.unit.compared import figures, write_records

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples/pretrain_gpt.py")
TRACKER = "latest_checkpointed_iteration.txt"


# The test


def noise(rng, count, *, correlation=0.0, deviation=1.0):
    """An AR(1) series."""
    values, value = [], rng.gauss(0, 1) / math.sqrt(1 - correlation**2)
    for _ in range(count):
        value = correlation * value + rng.gauss(0, 1)
        values.append(value * deviation * math.sqrt(1 - correlation**2))
    return values


def curves(rng, difference, *, count=300, correlation=0.5, deviation=0.02):
    """Two loss curves over the same samples; ``difference`` by iteration, from 0."""
    base = [4 - i / 200 + rng.gauss(0, 0.3) for i in range(count)]
    rest = noise(rng, count, correlation=correlation, deviation=deviation)
    return [loss + difference(i) + each for i, (loss, each) in enumerate(zip(base, rest))], base


# Without widening it would be 4.6, 6 and 9.5 of 100.
@pytest.mark.parametrize("correlation, most", [(0, 0.06), (0.5, 0.06), (0.8, 0.08)])
def test_curves_that_do_not_part_are_called_parted_in_about_5_of_100_cases(correlation, most):
    rng, count = random.Random(f"no difference {correlation}"), 1000
    found = [gap(*curves(rng, lambda i: 0, correlation=correlation)) for _ in range(count)]
    assert 0.03 <= sum(each.parts for each in found) / count <= most
    assert 0.03 <= sum(each.moves for each in found) / count <= most


def test_a_difference_is_found_and_its_interval_holds_it():
    rng, count = random.Random("a difference"), 500
    found = [gap(*curves(rng, lambda i: -0.0625)) for _ in range(count)]
    assert all(each.parts and each.level < 0 for each in found)
    holds = sum(abs(each.level + 0.0625) <= each.level_error for each in found)
    assert 0.93 <= holds / count <= 0.98
    # What "would have been seen": twice the half width.
    twice = 2 * sum(each.level_error for each in found) / count
    seen = [gap(*curves(rng, lambda i: twice)).parts for _ in range(count)]
    assert sum(seen) / count >= 0.93


def test_a_growing_gap_is_told():
    rng = random.Random("growing")
    found = gap(*curves(rng, lambda i: 0.001 * max(0, i - 100)))
    assert found.parts and found.moves
    assert found.trend == pytest.approx(0.1, abs=found.trend_error)
    assert found.quarters[:1] + found.quarters[3:] == [
        pytest.approx(0, abs=0.01), pytest.approx(0.162, abs=0.01)]


def test_blocks_are_those_of_the_last_half():
    # In the first half the runs are far apart; then the difference is 1/4 in every iteration.
    base = [1.0] * 47
    found = gap([9.0] * 23 + [1.25] * 24 + [5.0], base)  # the longer run ends later
    assert (found.counted, found.block) == ((28, 47), 2)
    assert (found.level, found.level_error, found.trend, found.correlation) == (0.25, 0, 0, 0)
    assert found.parts and not found.moves
    same = gap(base, base)
    assert (same.level, same.level_error, same.parts, same.moves) == (0, 0, False, False)
    with pytest.raises(ValueError, match="39 iterations: at least 40"):
        gap(base[:39], base)


def test_errors_are_those_of_a_line_through_the_blocks():
    # Blocks at 2 k + 1, or 1 less and 1 more in turn: the rest is -1 and 1 but for a small slope.
    means = [2 * k + (-1) ** (k + 1) for k in range(10)]
    found = gap([0.0] * 20 + [mean for mean in means for _ in range(2)], [0.0] * 40)
    slope = 2 + sum((k - 4.5) * (-1) ** (k + 1) for k in range(10)) / 82.5
    squares = sum((mean - 9 - slope * (k - 4.5)) ** 2 for k, mean in enumerate(means))
    assert found.level == pytest.approx(9) and found.trend == pytest.approx(slope * 50)
    assert found.correlation == 0  # neighbours are unlike
    assert found.level_error == pytest.approx(2.306 * math.sqrt(squares / 8 / 10))
    assert found.trend_error == pytest.approx(2.306 * math.sqrt(squares / 8 / 82.5) * 50)


def test_blocks_that_are_alike_say_less():
    # Rests of 1 1 -1 -1 ... about a line: 5 pairs are alike and 4 are not.
    means = [1, 1, -1, -1, 1, 1, -1, -1, 1, 1]
    found = gap([0.0] * 20 + [mean for mean in means for _ in range(2)], [0.0] * 40)
    rest = [mean - 0.2 for mean in means]
    shown = sum(a * b for a, b in zip(rest, rest[1:])) / sum(a * a for a in rest)
    assert found.correlation == pytest.approx(shown + (2 + 6 * shown) / 10) and shown > 0
    wider = math.sqrt((1 + found.correlation) / (1 - found.correlation))
    alone = 2.306 * math.sqrt(sum(a * a for a in rest) / 8 / 10)
    assert found.level_error == pytest.approx(alone * wider)


def test_over_seeds_the_spread_of_the_seeds_decides():
    base = [1.0] * 40
    pairs = [([1 + each] * 40, base) for each in (0.25, 0.5, 0.75)]
    found = gap_over_seeds(pairs)
    assert (found.level, found.seeds, found.block) == (0.5, 3, None)
    assert found.level_error == pytest.approx(4.303 * 0.25 / math.sqrt(3)) and not found.parts
    assert found.quarters == [0.5] * 4


def test_percentiles_of_students_t():
    assert (percentile(1), percentile(9), percentile(30)) == (12.706, 2.262, 2.042)
    assert percentile(100) == 2.042  # a little too wide, 1.984 is exact
    assert interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert math.isnan(interval([1.0])[1])


# What it says


def run(schedule, losses, *, seed=1, a=4, label=None):
    found = figures(schedule, label, losses=losses, ends=range(1, len(losses) + 1), seed=seed)
    return found | {"accumulation": a if schedule == "paci" else None}


def short(iterations=300, done=0, seeds=(1,), taken_out=()):
    return Short(iterations=iterations, done=done, seeds=list(seeds), taken_out=list(taken_out))


def verdict_of(difference, *, seed="x", more=None, **changes):
    losses, base = curves(random.Random(seed), difference)
    return short_verdict({"1f1b": run("1f1b", base), "paci": run("paci", losses)} | (more or {}),
                         short(**changes))


def test_curves_that_part_are_told_with_the_remedy():
    found = verdict_of(lambda i: 0.05, done=5000, taken_out=["--save", "x"])
    numbers = found["gaps"]["PACI (a=4)"]
    assert found["headline"] == (
        f"The loss curves part: PACI (a=4) is {numbers['level']:.4f} ± "
        f"{numbers['level_error']:.4f} above 1F1B (95%, iterations 5151 to 5300, 10 blocks of 15, "
        "the same samples in both).")
    [remedy] = found["next"]
    assert "larger --paci-accum" in remedy and "lower the learning rate" in remedy
    assert any(text.startswith("Left out") and "--save x" in text for text in found["facts"])
    assert any("--seeds 3" in text for text in found["facts"])
    below = verdict_of(lambda i: -0.05)
    assert " below 1F1B" in below["headline"] and "without --short" in below["next"][0]


def test_no_difference_is_told_with_what_would_have_been_seen():
    found = verdict_of(lambda i: 0)
    error = found["gaps"]["PACI (a=4)"]["level_error"]
    assert found["headline"].startswith("No difference seen: PACI (a=4) is ")
    assert found["headline"].endswith(f"; one of {2 * error:.4f} would have been seen.")


def test_a_gap_that_moves_is_told():
    assert "the gap grows by 0.0944 ± 0.0180" in verdict_of(lambda i: i / 1000)["headline"]
    assert "the gap shrinks by 0.1056 ± 0.01" in verdict_of(lambda i: (600 - i) / 1000)["headline"]
    turns = verdict_of(lambda i: (i - 225) / 1000)
    assert turns["headline"].startswith("No difference seen")
    assert "; but the difference rises by 0.0944 ± 0.0180 in" in turns["headline"]
    assert "on the way up" in turns["next"][0]


def test_a_loss_that_is_no_number_any_more_is_told():
    losses, base = curves(random.Random(1), lambda i: 0)
    broken = losses[:100] + [math.nan] * 200
    found = short_verdict({"a": run("1f1b", base), "b": run("paci", broken)}, short())
    assert found["headline"] == ("PACI (a=4) does not train here: its loss is not a number any "
                                 "more from iteration 101 of the run on.")
    assert "lower the learning rate" in found["next"][0]
    both = {"a": run("1f1b", [*base[:7], math.inf]), "b": run("paci", broken)}
    assert short_verdict(both, short())["headline"].startswith("1F1B does not train here")
    seeds = {f"{name}{seed}": run(name, values, seed=seed) for seed in (1, 2) for name, values in (
        ("1f1b", [loss + seed for loss in base]), ("paci", broken if seed == 2 else losses))}
    assert "on under 1 of 2 seeds." in short_verdict(seeds, short(seeds=(1, 2)))["headline"]


def test_runs_that_cannot_be_compared_are_told():
    losses, base = curves(random.Random(1), lambda i: 0)
    assert "with the same seed" in short_verdict({"a": run("1f1b", base)}, short())["headline"]
    other = short_verdict({"a": run("1f1b", base, seed=2), "b": run("paci", losses)}, short())
    assert "No verdict" in other["headline"] and other["facts"] == []
    few = short_verdict({"a": run("1f1b", base[:30]), "b": run("paci", losses)}, short())
    assert "30 iterations are too few" in few["headline"]
    batches = run("paci", losses)
    batches["samples"] = [2 * each for each in batches["samples"]]
    assert "other numbers of samples" in short_verdict(
        {"a": run("1f1b", base), "b": batches}, short())["headline"]


def test_the_shorter_run_decides_how_long_the_comparison_is():
    losses, base = curves(random.Random(1), lambda i: 0.05)
    found = short_verdict({"a": run("1f1b", base), "b": run("paci", losses[:200])}, short())
    assert "iterations 101 to 200, 10 blocks of 10" in found["headline"]
    assert any("only 200 of 300 iterations" in text for text in found["facts"])


def test_every_accumulation_has_its_sentence():
    losses, base = curves(random.Random(1), lambda i: 0)
    far = [loss + 1 for loss in losses]
    found = short_verdict({"a": run("1f1b", base), "b": run("paci", far, a=2),
                           "c": run("paci", losses, a=8)}, short())
    first, _, second = found["headline"].partition("). ")
    assert first.startswith("The loss curves part: PACI (a=2)")
    assert second.startswith("No difference seen: PACI (a=8)")


def test_seeds_are_compared_pair_by_pair():
    rng, runs = random.Random(5), {}
    for seed in (1, 2, 3):
        losses, base = curves(rng, lambda i: 0.05)
        runs |= {f"a{seed}": run("1f1b", base, seed=seed), f"b{seed}": run("paci", losses,
                                                                          seed=seed)}
    found = short_verdict(runs, short(seeds=(1, 2, 3)))
    assert "iterations 151 to 300, 3 seeds, the same" in found["headline"]
    assert not any("--seeds 3" in text for text in found["facts"])
    # A seed that changes nothing is no further evidence.
    for seed in (2, 3):
        runs[f"a{seed}"]["loss"] = runs["a1"]["loss"]
        runs[f"b{seed}"]["loss"] = runs["b1"]["loss"]
    alone = short_verdict(runs, short(seeds=(1, 2, 3)))
    assert "10 blocks of 15" in alone["headline"]
    assert any("count as one" in text for text in alone["facts"])


# What is run


def test_the_script_goes_on_as_it_would_but_saves_nothing_and_ends_in_time(tmp_path):
    (tmp_path / TRACKER).write_text("5000\n")
    given = ["--save", "a", "--load", str(tmp_path), "--exit-duration-in-mins=3", "--lr", "1",
             "--exit-interval", "7", "--train-iters", "9000", "--seed", "5"]
    found, arguments = make_short(given, iterations=200, num_seeds=2)
    assert (found.done, found.last, found.seeds) == (5000, 5200, [5, 6])
    assert found.taken_out == ["--save", "a", "--exit-duration-in-mins=3", "--exit-interval", "7"]
    assert arguments == ["--load", str(tmp_path), "--lr", "1", "--train-iters", "9000", "--seed",
                         "5", "--exit-interval", "5200", "--exit-on-missing-checkpoint"]
    # No iteration before the last one is a multiple of the interval.
    assert [i for i in range(5001, 5201) if i % 5200 == 0] == [5200]
    fresh, arguments = make_short(["--lr", "1"])
    assert (fresh.done, fresh.last, fresh.seeds) == (0, 300, [1234])
    assert arguments == ["--lr", "1", "--exit-interval", "300"]


def test_where_megatron_goes_on(tmp_path):
    (tmp_path / TRACKER).write_text("70")
    (tmp_path / "iter_0000060").mkdir()
    load = str(tmp_path)
    assert iterations_done(load=None) == 0
    assert iterations_done(load=load) == 70
    assert iterations_done(load=load, step=60) == 60
    assert iterations_done(load=load, override=5) == 5
    assert iterations_done(load=load, finetune=True) == 0
    assert iterations_done(load="nowhere", pretrained=load) == 0
    for wrong, reason in (({"load": "nowhere"}, "--load nowhere: holds no checkpoint"),
                          ({"load": None, "pretrained": "x"}, "--pretrained-checkpoint x: holds"),
                          ({"load": load, "step": 65}, "--ckpt-step 65")):
        with pytest.raises(ValueError, match=reason):
            iterations_done(**wrong)
    (tmp_path / TRACKER).write_text("release")
    assert iterations_done(load=load) == 0
    (tmp_path / TRACKER).write_text("soon")
    with pytest.raises(ValueError, match="no iteration"):
        iterations_done(load=load)


def test_flags_are_taken_out_with_their_values():
    assert take_out(["a", "--x", "1", "--y=2", "--z", "--x"], ["--x", "--y"]) == (
        ["a", "--z"], ["--x", "1", "--y=2", "--x", ""])


def printed(tmp_path, capsys, *words):
    """The plan of a command line, and the commands that it prints."""
    out = tmp_path / "out"
    assert main(["compare", "--output", str(out), "--short", "--print-commands", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line[0] == "#"]
    return Plan.read(out / "plan.json"), lines


def test_both_schedules_with_every_seed_and_nothing_else(tmp_path, capsys):
    plan, lines = printed(tmp_path, capsys, "--seeds", "2", "--accum", "4", SCRIPT, "--seed", "8",
                          "--save", "x", "--tensorboard-dir", "y")
    assert [found.name for found in plan.runs] == ["1f1b", "paci-a4", "1f1b-seed9", "paci-a4-seed9"]
    assert lines[4] == "# 1F1B, seed 9"
    first, _, _, last = plan.runs
    folder = [f"{last.folder}/tensorboard-dir"]
    assert last.added == ["--pipeline-schedule", "paci", "--paci-accum", "4", "--seed", "9",
                          "--tensorboard-dir", *folder]
    assert "--seed" not in first.added  # the same run whatever --seeds is
    for found in plan.runs:
        assert "--save" not in found.command and "--paci-trace" not in found.command
        assert found.command[-4:-1] != [] and "--exit-interval" in found.command
    assert plan.short == short(seeds=(8, 9), taken_out=("--save", "x"))


@pytest.mark.parametrize("words, reason", [
    (["--short", "--schedules", "interleaved", SCRIPT], "--short compares PACI with 1F1B"),
    (["--short", "--schedules", "1f1b,interleaved,paci", SCRIPT], "--short compares PACI"),
    (["--short", "--iterations", "39", SCRIPT], "--iterations 39: too small; give 40 or more"),
    (["--short", "--seeds", "0", SCRIPT], "--seeds 0: too small"),
    (["--short", SCRIPT, "--load", "nowhere"], "would start from random weights"),
    (["--short", SCRIPT, "--seed", "x"], "--seed x: not a whole number"),
    (["--iterations", "100", SCRIPT], "--iterations 100: goes with --short alone"),
    (["--seeds", "3", SCRIPT], "--seeds 3: goes with --short alone"),
])
def test_nonsense_is_refused_with_the_reason(words, reason, tmp_path, capsys):
    assert main(["compare", "--output", str(tmp_path / "o"), *words]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_the_line_is_on_the_terminal_and_on_top_of_the_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "_draw", lambda *_: [])
    plan, _ = printed(tmp_path, capsys, SCRIPT)
    losses, base = curves(random.Random(2), lambda i: 0.05)
    for name, values in (("1f1b", base), ("paci", losses)):
        write_records(tmp_path / "out/runs" / name / "record", name, losses=values,
                      ends=list(range(1, 301)))
    out = tmp_path / "out"
    assert main(["compare", "--output", str(out), "--report-only"]) == 0
    line = json.loads((out / "report.json").read_text())["verdict"]["headline"]
    assert line.startswith("The loss curves part: PACI (a=4) is 0.05")
    assert capsys.readouterr().out.splitlines()[1] == line
    assert (out / "report.md").read_text().splitlines()[:3] == [
        "# Loss curves compared: pretrain_gpt.py", "", f"**{line}**"]


def test_no_virtual_time_is_measured(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(command, "problems", lambda plan: {})
    monkeypatch.setattr(command, "compare", lambda plan, output, **options: asked.update(options))
    main(["compare", "--output", str(tmp_path), "--device", "cpu", "--short", SCRIPT])
    assert asked["virtual"] is False and asked["run"] is True
