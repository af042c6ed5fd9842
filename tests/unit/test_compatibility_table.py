"""The table behind docs/compatibility.md: complete, free of contradictions, proved, up to date."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from megatron_paci.arguments import megatron_arguments, paci_arguments
from megatron_paci.features import WORKS
from megatron_paci.hooks import megatron_version
from megatron_paci.known_arguments import INDIFFERENT, MEGATRON_VERSION, ONLY_IN_0_18
from megatron_paci.refused import PACI_RULES
from megatron_paci.rules import SELECTION_RULES
from megatron_paci.unproved import UNPROVED

ROOT = Path(__file__).resolve().parents[2]
FROM_LAUNCH_SCRIPTS = {"modelopt_enabled"}
of_the_table = pytest.mark.skipif(
    megatron_version() != MEGATRON_VERSION,
    reason="the table is that of another version of Megatron-Core",
)
INDIFFERENT_NAMES = [name for names in INDIFFERENT.values() for name in names.split()]


def relevant() -> set[str]:
    """Return every argument that a feature or a rule names."""
    entries = (*WORKS, *UNPROVED, *SELECTION_RULES, *PACI_RULES)
    return {name for entry in entries for name in entry.arguments}


def test_every_argument_of_megatron_is_classified_once():
    assert not relevant() & set(INDIFFERENT_NAMES)
    assert sorted(INDIFFERENT_NAMES) == sorted(set(INDIFFERENT_NAMES))
    assert set(megatron_arguments()) - relevant() - set(INDIFFERENT_NAMES) == set()


@of_the_table
def test_no_argument_is_known_that_megatron_does_not_have():
    known = relevant() | set(INDIFFERENT_NAMES)
    extra = known - set(megatron_arguments()) - set(paci_arguments())
    assert extra == FROM_LAUNCH_SCRIPTS | set(ONLY_IN_0_18.split())


@pytest.mark.parametrize("features", [WORKS, UNPROVED], ids=["works", "unproved"])
def test_no_argument_is_on_two_lines(features):
    names = [name for feature in features for name in feature.arguments]
    assert sorted(names) == sorted(set(names))


def test_what_works_is_proved_and_what_is_not_proved_is_noticed():
    assert all(feature.proofs for feature in WORKS)
    assert all(feature.in_use and not feature.proofs for feature in UNPROVED)


def test_every_proof_is_a_test():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    proofs = set(re.findall(r"`(tests/[^`]+::[^`]+)`", page))
    assert proofs >= {proof for feature in WORKS for proof in feature.proofs}
    for proof in proofs:
        path, name = proof.split("::")
        tree = ast.parse((ROOT / path).read_text())
        tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in tests and name.startswith("test_"), proof


@of_the_table
def test_the_page_is_what_the_command_writes():
    script = runpy.run_path(str(ROOT / "docs" / "compatibility.py"))
    written = (ROOT / "docs" / "compatibility.md").read_text()
    assert script["page"]() == written, "run: python docs/compatibility.py"
