"""docs/paper.py: what can be worked out of the papers' tables comes out and is in docs/paper.md."""

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def paper():
    sys.path.insert(0, str(DOCS))
    try:
        import paper
    finally:
        sys.path.remove(str(DOCS))
    return paper


def small(paper):
    """Return the rows with eight stages; the larger ones take seconds."""
    return [row for row in paper.runs() if row[0].stages == 8]


def lines(paper, rows):
    return paper.table("", rows)[2:-1]


def test_bubble_rates_are_the_printed_ones_to_the_last_digit(paper):
    for setting, run in small(paper):
        for name, printed in run.bubble.items():
            assert round(paper.bubble_rate(name, setting, run), 4) == printed


def test_the_theory_of_the_training_runs(paper):
    assert [row[3] for row in paper.training_rows()] == ["2.75", "1.875", "1.875", "1.4375"]
    for _, _, flush, ours, printed in paper.TRAINING:
        assert round(flush / ours, 2) == printed


def test_the_projected_column_is_1f1b_without_its_bubble(paper):
    for setting, run in paper.runs():
        assert paper.projected(setting, run) == run.throughput["paci"]


def test_the_document_is_up_to_date_where_that_is_quick(paper, monkeypatch):
    text = (DOCS / "paper.md").read_text()
    few = small(paper)
    monkeypatch.setattr(paper, "runs", lambda: iter(few))
    monkeypatch.setattr(paper, "SETTINGS", [s for s in paper.SETTINGS if s.stages == 8])
    for rows in (paper.training_rows(), paper.bubble_rows(), paper.throughput_rows(scaled=False),
                 paper.throughput_rows(scaled=True), paper.memory_rows()):
        found = lines(paper, rows)
        assert found and all(line in text for line in found)
    assert "24 of the 24 printed rates" in text
