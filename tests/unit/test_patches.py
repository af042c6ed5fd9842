"""The source diffs in patches/: what is in them, how they are applied and taken out again."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest

from megatron_paci.hooks import PATCHES
from megatron_paci.patching import Patch

FOLDER = Path(__file__).resolve().parents[2] / "patches"
spec = importlib.util.spec_from_file_location("paci_generate", FOLDER / "generate.py")
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)
apply = sys.modules["apply"]  # patches/apply.py, which generate.py has imported

NAMES = ("core_v0.18.2", "core_v0.19.0")
INSTALLED = Path(megatron.core.__file__).resolve().parents[2]

TIMERS = """\
# A stranger's file.
import time
from abc import (
    ABC,
)


class Timer(ABC):
    def start(self, barrier=False):
        return time.time()


@staticmethod
def elapsed(names):
    def start(): ...
    return names
"""
HOOKED_TIMERS = """\
# A stranger's file.
import time
from abc import (
    ABC,
)
# PACI: hooks of the plugin megatron_paci, see patches/README.md there
from megatron_paci.source_hooks import paci_hook


class Timer(ABC):
    # PACI: no barrier
    @paci_hook("Timer.start")
    def start(self, barrier=False):
        return time.time()


# PACI: own times
@paci_hook("elapsed")
@staticmethod
def elapsed(names):
    def start(): ...
    return names
"""
LOOP = "import os\n\n\ndef train(model):\n    return model"  # no newline at the end
RECORDS = {
    "megatron/core/timers.py": [Patch("megatron.core.timers:elapsed", None, (), "own times"),
                                Patch("megatron.core.timers:Timer.start", None, (), "no barrier")],
    "megatron/training/loop.py": [Patch("megatron.training.loop:train", None, (), "the stage")],
}


@pytest.fixture
def diffs():
    return apply.read_diffs(FOLDER)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small checkout, and a folder with one diff for it in place of patches/."""
    checkout, folder = tmp_path / "checkout", tmp_path / "patches"
    for path, text in (("megatron/core/timers.py", TIMERS), ("megatron/training/loop.py", LOOP)):
        (checkout / path).parent.mkdir(parents=True)
        (checkout / path).write_text(text)
        (checkout / path).chmod(0o640)
    folder.mkdir()
    monkeypatch.setattr(apply, "FOLDER", folder)
    monkeypatch.setattr(generate, "modules", lambda: RECORDS)
    (folder / "small.patch").write_text(generate.whole_diff(checkout, "small"))
    return checkout


def files(checkout: Path) -> dict[str, bytes]:
    return {str(path.relative_to(checkout)): path.read_bytes()
            for path in checkout.rglob("*") if path.is_file()}


# The diffs in the repository


def test_there_is_a_diff_for_each_version(diffs):
    assert tuple(diffs) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_diff_has_the_hooks_and_not_a_line_more(name, diffs):
    """So no line of Megatron is in it, and every record is in it once, with its reason."""
    expected = {
        path: sorted([generate.IMPORT, *(
            generate.hook(method := patch.target.split(":")[1], patch.why,
                          "    " if "." in method else "") for patch in patches)])
        for path, patches in generate.modules().items()
    }
    found = {file.path: sorted(text.decode() for _, text in file.insertions)
             for file in diffs[name]}
    assert found == expected
    assert sum(map(len, found.values())) == len(PATCHES.patches) + len(found)
    text = generate.HEAD.format(name=name) + "\n" + "".join(map(generate.as_text, diffs[name]))
    assert (FOLDER / f"{name}.patch").read_text() == text
    lines = [line for line in text.splitlines() if line.startswith("+")]
    assert max(map(len, lines)) <= 101  # Megatron's 100, behind the +


def test_the_readme_has_the_table_of_the_hooks():
    assert (FOLDER / "README.md").read_text() == generate.readme(), "run: patches/generate.py"
    for patch in PATCHES.patches:
        assert f"| `{patch.target}` | {patch.why} |" in generate.table()


def test_the_hooks_go_into_the_installed_megatron_and_out_again(tmp_path, diffs, capsys):
    """The hooked files of the wheel of 0.19.2 are those of core_v0.19.0."""
    for path in generate.modules():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(INSTALLED / path, tmp_path / path)
    try:
        name, _ = apply.find_diff(tmp_path, diffs)
    except apply.DiffError:
        pytest.skip("there is no diff for the installed Megatron-Core")
    assert generate.whole_diff(tmp_path, name) == (FOLDER / f"{name}.patch").read_text()
    before = files(tmp_path)
    assert apply.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"put the hooks for {name} into 10 files of {tmp_path}\n"
    for path, patches in generate.modules().items():
        assert hooks_of(tmp_path / path) == {patch.target.split(":")[1] for patch in patches}
    assert apply.main([str(tmp_path), "--revert"]) == 0
    assert files(tmp_path) == before


def hooks_of(path: Path) -> set[str]:
    """Return the names of decorated functions, each of which has to be the decorator's argument."""
    tree, found = ast.parse(path.read_bytes()), set()
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                name = f"{owner.name}.{node.name}" if owner is not tree else node.name
                if ast.unparse(node.decorator_list[0]) == f"paci_hook('{name}')":
                    found.add(name)
    return found


# Making a diff


def test_lines_go_above_decorators_and_behind_the_imports(tree, capsys):
    assert apply.main([str(tree)]) == 0
    assert (tree / "megatron/core/timers.py").read_text() == HOOKED_TIMERS
    assert (tree / "megatron/training/loop.py").read_text().endswith(
        '\n# PACI: the stage\n@paci_hook("train")\ndef train(model):\n    return model')
    assert (tree / "megatron/core/timers.py").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "source, words",
    [
        ("import os\ndef start(): ...\n", "does not define the function train exactly once"),
        ("import os\ndef train(): ...\ndef train(): ...\n", "train exactly once"),
        ("import os\nclass train: ...\n", "train exactly once"),
        ('import os\n@paci_hook("train")\ndef train(): ...\n', "hooked already"),
        ("def train(): ...\nimport os\n", "no import above"),
        ("import os\ndef train(:\n", "invalid syntax"),
    ],
)
def test_a_source_without_a_place_for_a_hook_is_refused(source, words):
    with pytest.raises(apply.DiffError, match=words) as caught:
        generate.file_diff("loop.py", source.encode(), RECORDS["megatron/training/loop.py"])
    assert str(caught.value).startswith("loop.py: ")


def test_generate_says_what_is_missing_in_a_checkout(tree, capsys):
    (tree / "megatron/core/timers.py").unlink()
    assert generate.main([str(tree), "other"]) == 2
    assert "No such file" in capsys.readouterr().err
    for arguments in ([str(tree)], [str(tree), "../other"]):
        with pytest.raises(SystemExit):
            generate.main(arguments)


# Applying and reverting


def test_reverting_gives_every_file_back(tree, capsys):
    before = files(tree)
    for arguments, status, words in (
        ([], 0, "put the hooks for small into 2 files"),
        ([], 2, "has the hooks for small already. Remedy: --revert"),
        (["--check"], 0, "is small with the hooks"),
        (["--revert"], 0, "it is small again"),
        (["--revert"], 2, "there is nothing to take out"),
        (["--check"], 0, "is small without the hooks"),
    ):
        assert apply.main([str(tree), *arguments]) == status
        output = capsys.readouterr()
        assert words in (output.err if status else output.out)
    assert files(tree) == before


@pytest.mark.parametrize(
    "command",
    [["git", "apply", "--unidiff-zero"], ["patch", "--silent", "--strip", "1", "--input"]],
    ids=["git", "patch"],
)
def test_other_tools_apply_the_diff_too(tree, command, capsys):
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}")
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    subprocess.run([*command, apply.FOLDER / "small.patch"], cwd=tree, env=environment, check=True)
    assert apply.main([str(tree), "--check"]) == 0
    assert "with the hooks" in capsys.readouterr().out
    assert apply.main([str(tree), "--revert"]) == 0
    assert (tree / "megatron/core/timers.py").read_text() == TIMERS


def test_a_checkout_with_changes_is_refused_and_left_alone(tree, capsys):
    with (tree / "megatron/core/timers.py").open("a") as file:
        file.write("# mine\n")
    before = files(tree)
    for arguments in ([], ["--revert"], ["--check"]):
        assert apply.main([str(tree), *arguments]) == 2
        error = capsys.readouterr().err
        assert "- megatron/core/timers.py: changed" in error and "loop.py" not in error
        assert "Remedy:" in error and "--3way" in error and "generate.py" in error
    (tree / "megatron/core/timers.py").unlink()
    assert apply.main([str(tree)]) == 2
    assert "- megatron/core/timers.py: missing" in capsys.readouterr().err
    assert files(tree) == {path: text for path, text in before.items() if "timers" not in path}


def test_a_folder_that_is_no_checkout_is_refused(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "none"):
        assert apply.main([str(folder)]) == 2
        assert "is no Megatron-LM checkout" in capsys.readouterr().err


def test_what_was_hooked_in_part_can_only_be_reverted(tree, capsys):
    before = files(tree)
    assert apply.main([str(tree)]) == 0
    (tree / "megatron/training/loop.py").write_text(LOOP)
    for arguments in ([], ["--check"]):
        assert apply.main([str(tree), *arguments]) == 2
        assert "in some files alone. Remedy: --revert" in capsys.readouterr().err
    assert apply.main([str(tree), "--revert"]) == 0
    assert files(tree) == before


def test_a_file_that_cannot_be_written_leaves_all_as_they_were(tree, monkeypatch, capsys):
    before, replace, calls = files(tree), os.replace, []

    def fails_at_the_second(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise PermissionError(f"cannot write {target}")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails_at_the_second)
    assert apply.main([str(tree)]) == 2
    assert len(calls) == 2 and files(tree) == before
    assert "nothing was changed. See that the checkout can be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("+@paci_hook(", "-@paci_hook(", "damaged at"),
        ("@@ -3,0 +6,2 @@", "@@ -2,0 +6,2 @@", "does not make of megatron/training/loop.py"),
        ("diff --git a/megatron/core", "diff --git a/megatron/more", "damaged at"),
        (None, "", "it is empty"),
    ],
)
def test_a_damaged_diff_changes_nothing(tree, old, new, words, capsys):
    before, path = files(tree), apply.FOLDER / "small.patch"
    text = path.read_text()
    assert old is None or old in text
    path.write_text(text.replace(old, new) if old else new)
    assert apply.main([str(tree)]) == 2
    assert words in capsys.readouterr().err and files(tree) == before


def test_a_folder_without_diffs_is_said(tree, capsys):
    (apply.FOLDER / "small.patch").unlink()
    assert apply.main([str(tree)]) == 2
    assert "there are no diffs" in capsys.readouterr().err


def test_a_file_has_the_hash_that_git_gives_it():
    assert apply.git_hash(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert apply.git_hash(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"
