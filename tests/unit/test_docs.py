"""The pages: what is generated is in step, commands run, no link is dead, names are documented.

docs/pages.py and docs/pictures.py make what is checked here.
"""

from __future__ import annotations

import ast
import re
import struct
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted(DOCS.glob("*.md")), ROOT / "patches/README.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:docs|examples|megatron_paci|patches|tests|tools)/[\w/.-]+)")
DIRECTIVE = re.compile(r"^\.\. automodule:: (\S+)\n(?:   :members:(.*)\n)?", re.MULTILINE)
# Made by real runs: make demo, docs/trace.md.
FROM_RUNS = {"demo.png", "trace-1f1b.png", "trace-paci.png"}
WIDTH = 1280

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture(scope="module")
def scripts():
    """Return docs/pages.py and docs/pictures.py as modules."""
    sys.path.insert(0, str(DOCS))
    try:
        import pages
        import pictures
    finally:
        sys.path.remove(str(DOCS))
    return pages, pictures


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Return what one can link to: the headings, as GitHub turns them into names."""
    prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@each_page
def test_what_is_generated_is_in_step(page, scripts):
    pages, _ = scripts
    assert pages.renewed(text_of(page)) == text_of(page), "run: python docs/pages.py"


def test_every_table_is_on_a_page(scripts):
    pages, _ = scripts
    used = [found[2] for page in PAGES for found in pages.TABLE.finditer(text_of(page))]
    assert sorted(used) == sorted(pages.TABLES)


@each_page
def test_every_simulation_on_a_page_runs(page, scripts):
    pages, _ = scripts
    for arguments in pages.simulations(text_of(page)):
        assert pages.output(arguments)


@each_page
def test_no_link_is_dead(page):
    for link in LINK.findall(text_of(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@each_page
def test_every_file_that_is_named_exists(page):
    missing = [name for name in FILE.findall(text_of(page)) if not (ROOT / name).exists()]
    assert not missing


def test_the_index_lists_every_page_once():
    listed = re.findall(r"^- \[([\w-]+\.md)\]\(\1\): \S", text_of(DOCS / "README.md"), re.MULTILINE)
    assert sorted(listed) == sorted({page.name for page in DOCS.glob("*.md")} - {"README.md"})


def test_the_french_readme_has_commands_of_the_english_one(scripts):
    pages, _ = scripts
    english, french = (
        list(pages.commands(text_of(ROOT / name))) for name in ("README.md", "README.fr.md")
    )
    assert french and [command for command in english if command in french] == french
    assert {"make demo", "make test"} <= set(french)


def test_pictures_are_used_wide_enough_and_can_be_made_again(scripts):
    _, pictures = scripts
    used = {Path(link).name for page in PAGES for link in LINK.findall(text_of(page))
            if link.endswith(".png")}
    assert used == {path.name for path in (DOCS / "images").iterdir()}
    figures = {name for name in used if name.startswith("convergence-")}  # docs/convergence.py
    assert used == FROM_RUNS | figures | set(pictures.DRAWN) | set(pictures.simulated())
    for name in used:
        head = (DOCS / "images" / name).read_bytes()[:24]
        assert struct.unpack(">I", head[16:20])[0] == WIDTH, name


def test_the_glossary_is_in_order_and_names_files_that_exist():
    text = text_of(DOCS / "glossary.md")
    rows = re.findall(r"^\| \*\*(.*?)\*\*.*\| (.*?) ?\|$", text, re.MULTILINE)
    words = [word.lower() for word, _ in rows]
    assert words == sorted(words) and len(words) == len(set(words)) > 40
    for _, files in rows:
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", files):
            assert (ROOT / "megatron_paci" / name).exists(), name


def public_names(tree: ast.Module, members: list[str]) -> list[tuple[str, ast.AST]]:
    """Return the functions, classes and methods of a module that the reference shows."""
    found: list[tuple[str, ast.AST]] = [("module", tree)]
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        if node.name in members if members else not node.name.startswith("_"):
            found.append((node.name, node))
            found += [
                (f"{node.name}.{method.name}", method)
                for method in node.body if isinstance(node, ast.ClassDef)
                and isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
            ]
    return found


def test_every_public_name_of_the_reference_has_a_docstring():
    shown = []
    for page in sorted((DOCS / "api").glob("*.rst")):
        for module, members in DIRECTIVE.findall(text_of(page)):
            path = ROOT / module.replace(".", "/")
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            tree = ast.parse(path.read_text(encoding="utf-8"))
            wanted = [name.strip() for name in members.split(",") if name.strip()]
            names = public_names(tree, wanted)
            assert {name for name, _ in names} >= set(wanted), module
            shown += [(f"{module}: {name}", node) for name, node in names]
    assert len(shown) > 200
    assert [name for name, node in shown if not ast.get_docstring(node)] == []


def test_every_page_of_the_reference_is_in_its_contents():
    listed = re.findall(r"^   (\w+)$", text_of(DOCS / "api" / "index.rst"), re.MULTILINE)
    assert sorted(listed) == sorted(
        page.stem for page in (DOCS / "api").glob("*.rst") if page.stem != "index"
    )
