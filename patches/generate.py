"""Make the diffs of this folder, and the table of its README, from the hooks of the plugin.

    python patches/generate.py CHECKOUT NAME     write patches/NAME.patch for a Megatron-LM checkout
    python patches/generate.py                   write the table in patches/README.md

A hook is a record of ``megatron_paci/hooks.py`` or ``loop.py``. The diff puts its decorator above
the function that the record names, and one import into each module; the rule itself stays in the
package alone. A fork whose files differ from Megatron's releases gets a diff of its own this way.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

from apply import DiffError, FileDiff, git_hash, read_diff  # noqa: E402

from megatron_paci.hooks import PATCHES  # noqa: E402
from megatron_paci.patching import Patch  # noqa: E402

README = FOLDER / "README.md"
TABLE = ("<!-- table: python patches/generate.py -->\n", "<!-- end of table -->\n")
IMPORT = (
    "# PACI: hooks of the plugin megatron_paci, see patches/README.md there\n"
    "from megatron_paci.source_hooks import paci_hook\n"
)
HEAD = """\
Hooks of megatron_paci for Megatron-LM at {name}, made by patches/generate.py. Insertions
alone, without context lines: use patches/apply.py, which checks that the files are the right ones,
or git apply --unidiff-zero.
"""


def modules() -> dict[str, list[Patch]]:
    """Return the hooks by file: path in a checkout to patches."""
    found: dict[str, list[Patch]] = {}
    for patch in PATCHES.patches:
        module = patch.target.split(":")[0]
        found.setdefault(module.replace(".", "/") + ".py", []).append(patch)
    return found


def insertions(source: bytes, patches: Iterable[Patch]) -> list[tuple[int, bytes]]:
    """Return what goes into one file: pairs (number of the line that it goes behind, text).

    Raises:
        DiffError: A function is not there exactly once, or is hooked already.
    """
    tree = ast.parse(source)
    found = [(_import_line(tree), IMPORT)]
    for patch in patches:
        name = patch.target.split(":")[1]
        function = _find(tree, name)
        first = min([function.lineno, *(node.lineno for node in function.decorator_list)])
        found.append((first - 1, hook(name, patch.why, " " * function.col_offset)))
    return [(after, text.encode()) for after, text in sorted(found)]


def hook(name: str, why: str, indent: str) -> str:
    """Return the lines above a hooked function."""
    return f'{indent}# PACI: {why}\n{indent}@paci_hook("{name}")\n'


def _import_line(tree: ast.Module) -> int:
    """Return the last line of the imports above the first function and class."""
    last = 0
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            break
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            last = node.end_lineno
    if not last:
        raise DiffError("it has no import above its first function")
    return last


def _find(tree: ast.Module, name: str) -> ast.FunctionDef:
    """Return the definition of ``function`` or ``Class.method``."""
    found = [tree]
    for part in name.split("."):
        found = [
            node for owner in found for node in owner.body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == part
        ]
    if len(found) != 1 or not isinstance(found[0], ast.FunctionDef):
        raise DiffError(f"it does not define the function {name} exactly once")
    if any("paci_hook" in ast.unparse(node) for node in found[0].decorator_list):
        raise DiffError(f"{name} is hooked already; take the hooks out first")
    return found[0]


def file_diff(path: str, source: bytes, patches: Iterable[Patch]) -> FileDiff:
    """Return the diff of one file.

    Raises:
        DiffError: As ``insertions``, or it is no Python.
    """
    try:
        places = insertions(source, patches)
    except (DiffError, SyntaxError) as error:
        raise DiffError(f"{path}: {error}") from error
    new = git_hash(FileDiff(path, "", "", places).hooked(source))
    return FileDiff(path, git_hash(source), new, places)


def as_text(diff: FileDiff) -> str:
    """Return a diff as git writes it, but without context and without names of functions."""
    path = diff.path
    lines = [f"diff --git a/{path} b/{path}\n", f"index {diff.old}..{diff.new} 100644\n",
             f"--- a/{path}\n", f"+++ b/{path}\n"]
    inserted = 0
    for after, text in diff.insertions:
        added = text.decode().splitlines(keepends=True)
        count = "" if len(added) == 1 else f",{len(added)}"
        lines.append(f"@@ -{after},0 +{after + inserted + 1}{count} @@\n")
        lines += [f"+{line}" for line in added]
        inserted += len(added)
    return "".join(lines)


def whole_diff(checkout: Path, name: str) -> str:
    """Return the diff of a checkout.

    Raises:
        DiffError: A file or a function is not there.
        OSError: A file cannot be read.
    """
    diffs = [
        as_text(file_diff(path, (checkout / path).read_bytes(), patches))
        for path, patches in sorted(modules().items())
    ]
    return HEAD.format(name=name) + "\n" + "".join(diffs)


def table() -> str:
    """Return the table of the README: every hook, why it is there, how each way is undone."""
    places = {path.stem: _lines_of_hooks(path) for path in sorted(FOLDER.glob("core_*.patch"))}
    lines = [
        f"| target | why | `--revert` takes out the line ({' / '.join(places)}) | "
        "`uninstall()` puts the original back |",
        "| --- | --- | --- | --- |",
    ]
    for path, patches in modules().items():
        for patch in patches:
            name = patch.target.split(":")[1]
            numbers = " / ".join(str(hooks[path, name]) for hooks in places.values())
            where = "in its class" if "." in name else "under every name"
            lines.append(f"| `{patch.target}` | {patch.why} | {numbers} | {where} |")
    return "\n".join(lines) + "\n"


def _lines_of_hooks(path: Path) -> dict[tuple[str, str], int]:
    """Return the line of each decorator in the hooked file: (file, name) to number."""
    found = {}
    for file in read_diff(path.read_text(encoding="utf-8")):
        inserted = 0
        for after, text in file.insertions:
            for line in text.decode().splitlines():
                inserted += 1
                if line.lstrip().startswith("@paci_hook("):
                    found[file.path, line.split('"')[1]] = after + inserted
    return found


def readme() -> str:
    """Return the README with the table as it should be."""
    start, end = TABLE
    before, rest = README.read_text(encoding="utf-8").split(start)
    return before + start + table() + end + rest.split(end)[1]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, help="folder of a Megatron-LM checkout")
    parser.add_argument("name", nargs="?", help="of the diff, such as core_v0.19.0")
    options = parser.parse_args(arguments)
    if (options.checkout is None) != (options.name is None):
        parser.error("give a checkout and a name for its diff, or neither")
    if options.name is not None and Path(options.name).name != options.name:
        parser.error(f"{options.name} is no name of a file")
    if options.name is None:
        README.write_text(readme(), encoding="utf-8")
        return 0
    try:
        text = whole_diff(options.checkout, options.name)
        (FOLDER / f"{options.name}.patch").write_text(text, encoding="utf-8")
    except (DiffError, OSError) as error:
        sys.stderr.write(f"megatron_paci: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
