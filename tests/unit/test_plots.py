"""megatron_paci/plots.py: the picture is a PNG of the promised size, whatever the runs hold."""

import math
import struct

import pytest

from megatron_paci.plots import COLOURS, plot_losses, run_colours, running_mean, spread


def run(count=50, *, losses=None, valid_loss=4.9, pace=0.25):
    """Made-up figures of one run."""
    losses = losses or [8.4 - 3 * i / count for i in range(count)]
    steps = range(1, len(losses) + 1)
    return {"loss": losses, "seconds": [pace * i for i in steps], "samples": [8 * i for i in steps],
            "valid_loss": valid_loss}


RUNS = {
    "two": {"1f1b": run(), "paci": run(pace=0.2, valid_loss=4.95)},
    "one": {"paci": run()},
    "different lengths": {"1f1b": run(10), "paci": run(200)},
    "other schedules": {name: run() for name in ("1f1b", "interleaved", "paci", "mine", "yours")},
    "gaps": {"1f1b": run(losses=[8.0, math.nan, None, 7.0]), "paci": run(valid_loss=math.nan)},
    "nothing finite": {"paci": run(losses=[math.nan] * 5, valid_loss=None)},
    "one iteration": {"paci": run(1)},
    "no validation": {"1f1b": run(valid_loss=None), "paci": run()},
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", RUNS)
def test_picture_is_a_png_of_1280_by_640_pixels(name, tmp_path):
    path = tmp_path / "loss.png"
    plot_losses(RUNS[name], path, title="A title", subtitle="and what was run")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1280, 640)
    assert 10_000 < len(data) < 1_000_000


@pytest.mark.parametrize("runs", [{}, {"paci": {**run(), "loss": []}}])
def test_nothing_to_plot_is_an_error(runs, tmp_path):
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_losses(runs, tmp_path / "loss.png", title="")
    assert not (tmp_path / "loss.png").exists()


def test_runs_have_colours_of_their_own_and_the_first_of_a_schedule_has_that_of_the_schedule():
    found = run_colours(
        {"1f1b": {}, "paci-a2": {"schedule": "paci"}, "paci-a4": {"schedule": "paci"}})
    assert (found["1f1b"], found["paci-a2"]) == (COLOURS["1f1b"], COLOURS["paci"])
    assert len(set(found.values())) == 3


def test_running_mean_keeps_gaps_and_is_not_moved_by_them():
    assert running_mean([1.0, 2.0, 3.0, 4.0], half_width=1) == [1.0, 2.0, 3.0, 3.5]
    means = running_mean([1.0, math.nan, 3.0, 5.0], half_width=1)
    assert math.isnan(means[1])
    assert [means[0], *means[2:]] == [1.0, 4.0, 4.0]


@pytest.mark.parametrize("positions, expected", [
    ([], []),
    ([3.0, 1.0], [3.0, 1.0]),
    ([1.0, 1.0], [0.5, 1.5]),
    ([2.0, 1.5, 9.0], [2.25, 1.25, 9.0]),
    ([1.0, 1.0, 2.0], [1 / 3, 4 / 3, 7 / 3]),
])
def test_labels_are_spread_no_more_than_needed(positions, expected):
    assert spread(positions, gap=1.0) == pytest.approx(expected)
