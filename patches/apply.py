"""Put the hooks into the source of a Megatron-LM checkout, or take them out again.

    python patches/apply.py CHECKOUT             put them in
    python patches/apply.py CHECKOUT --revert    take them out, byte for byte
    python patches/apply.py CHECKOUT --check     say whether they are in, change nothing

The diffs beside this script have no context lines, so their places are line numbers. Each carries
the git hash of every whole file before and after; the script changes a checkout only if all of its
files are exactly those, and then all of them or none. Exit status: 0 done, or in order; 2 not, with
the reason and the remedy.

Needs Python 3.6 and nothing else.
"""

import argparse
import hashlib
import os
import re
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
FILE = re.compile(r"diff --git a/(?P<path>\S+) b/(?P=path)\n"
                  r"index (?P<old>[0-9a-f]{40})\.\.(?P<new>[0-9a-f]{40}) 100644\n"
                  r"--- a/(?P=path)\n\+\+\+ b/(?P=path)\n"
                  r"(?P<hunks>(?:@@ .*\n(?:\+.*\n)+)+)")
HUNK = re.compile(r"@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@\n((?:\+.*\n)+)")
UNFINISHED = ".megatron_paci"


class DiffError(Exception):
    """What the user can put right; the message holds the reason and the remedy."""


class FileDiff:
    """What goes into one file.

    Attributes:
        path: Of the file in a checkout.
        old: Git hash of the file without the hooks.
        new: Git hash of the file with them.
        insertions: Pairs (number of the line of the old file that the text goes behind, text).
    """

    def __init__(self, path, old, new, insertions):
        self.path, self.old, self.new, self.insertions = path, old, new, insertions

    def hooked(self, content):
        """Return ``content`` (bytes of the old file) with the insertions."""
        lines = content.splitlines(keepends=True)
        for after, text in reversed(self.insertions):
            lines[after:after] = [text]
        return b"".join(lines)

    def stock(self, content):
        """Return ``content`` (bytes of the new file) without the insertions."""
        lines = content.splitlines(keepends=True)
        for after, text in self.insertions:  # what is above a place has been taken out already
            del lines[after:after + text.count(b"\n")]
        return b"".join(lines)


def git_hash(content):
    """Return the name that git gives to a file of this content: ``git hash-object FILE``."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def read_diff(text):
    """Return the ``FileDiff`` list of a diff.

    Raises:
        DiffError: It is not one of insertions without context alone.
    """
    files, end = [], max(text.find("diff --git "), 0)
    while end < len(text):
        match = FILE.match(text, end)
        if not match:
            raise DiffError("it is damaged at {!r}; take the file from the repository "
                            "again".format(text[end:end + 60]))
        insertions = [(int(after), lines.replace("\n+", "\n")[1:].encode())
                      for after, _, _, lines in HUNK.findall(match["hunks"])]
        files.append(FileDiff(match["path"], match["old"], match["new"], insertions))
        end = match.end()
    if not files:
        raise DiffError("it is empty; take the file from the repository again")
    return files


def read_diffs(folder):
    """Return the diffs in ``folder`` by name.

    Raises:
        DiffError: One is damaged, or there is none.
    """
    diffs = {}
    for path in sorted(folder.glob("*.patch")):
        try:
            diffs[path.stem] = read_diff(path.read_text(encoding="utf-8"))
        except DiffError as error:
            raise DiffError("{}: {}".format(path, error)) from error
    if not diffs:
        raise DiffError("there are no diffs in {}; take that folder from the repository "
                        "again".format(folder))
    return diffs


def states(checkout, files):
    """Return the state of each file: ``stock``, ``hooked``, ``changed`` or ``missing``."""
    found = {}
    for file in files:
        path = checkout / file.path
        if path.is_file():
            known = {file.old: "stock", file.new: "hooked"}
            found[file.path] = known.get(git_hash(path.read_bytes()), "changed")
        else:
            found[file.path] = "missing"
    return found


def find_diff(checkout, diffs):
    """Return (name, {path: state}) of the diff that was made for this checkout.

    Raises:
        DiffError: There is none.
    """
    if not (checkout / "megatron" / "core").is_dir():
        raise DiffError("{} is no Megatron-LM checkout: there is no megatron/core in it; give the "
                        "folder that pretrain_gpt.py lies in".format(checkout))
    known = {name: states(checkout, files) for name, files in diffs.items()}
    strange = {name: [path for path, state in found.items() if state in ("changed", "missing")]
               for name, found in known.items()}
    name = min(strange, key=lambda name: len(strange[name]))
    if strange[name]:
        lines = "\n".join("- {}: {}".format(path, known[name][path]) for path in strange[name])
        raise DiffError(
            "{} is none of {}, with or without the hooks. It is nearest to {}, except for\n{}\n"
            "Nothing was changed. Remedy: check out these files as they are there; or, for a fork "
            "that has changed them, let git merge the diff (git apply --unidiff-zero --3way {}) "
            "or make another one (python patches/generate.py {} NAME)".format(
                checkout, " and ".join(diffs), name, lines, FOLDER / (name + ".patch"), checkout))
    return name, known[name]


def replace_all(checkout, contents):
    """Give every file of ``contents`` (path to bytes) its content; all of them or none.

    Raises:
        DiffError: One could not be written; all are as they were.
    """
    before, unfinished = {}, {}
    try:
        for path, content in contents.items():
            target = (checkout / path).resolve()
            unfinished[target] = target.with_name(target.name + UNFINISHED)
            unfinished[target].write_bytes(content)
            shutil.copymode(str(target), str(unfinished[target]))
        for target, beside in unfinished.items():
            content = target.read_bytes()
            os.replace(str(beside), str(target))
            before[target] = content
    except BaseException as error:
        for target, content in before.items():
            target.write_bytes(content)
        if isinstance(error, OSError):
            raise DiffError("{}; nothing was changed. See that the checkout can be written "
                            "to".format(error)) from error
        raise
    finally:
        for beside in unfinished.values():
            if beside.exists():
                beside.unlink()


def apply(checkout, name, files, found):
    """Put the hooks in; return what was done, in words."""
    if "hooked" in found.values():
        where = "in some files alone" if "stock" in found.values() else "already"
        raise DiffError("{} has the hooks for {} {}. Remedy: --revert takes them out".format(
            checkout, name, where))
    change(checkout, files, found, "stock", FileDiff.hooked, "new")
    return "put the hooks for {} into {} files of {}".format(name, len(files), checkout)


def revert(checkout, name, files, found):
    """Take the hooks out, also if only some files have them; return what was done, in words."""
    if "hooked" not in found.values():
        raise DiffError("{} is {} without the hooks; there is nothing to take out".format(
            checkout, name))
    change(checkout, files, found, "hooked", FileDiff.stock, "old")
    return "took the hooks out of {}; it is {} again".format(checkout, name)


def check(checkout, name, files, found):
    """Return the state of the checkout, in words; a half-hooked one is an error."""
    if len(set(found.values())) > 1:
        raise DiffError("{} has the hooks for {} in some files alone. Remedy: --revert takes them "
                        "out".format(checkout, name))
    return "{} is {} {} the hooks".format(
        checkout, name, "with" if "hooked" in found.values() else "without")


def change(checkout, files, found, state, convert, goal):
    """Convert every file in ``state``; the results must have the hashes in attribute ``goal``."""
    contents = {}
    for file in files:
        if found[file.path] == state:
            content = convert(file, (checkout / file.path).read_bytes())
            if git_hash(content) != getattr(file, goal):
                raise DiffError("the diff is damaged: it does not make of {} what it says; take "
                                "it from the repository again".format(file.path))
            contents[file.path] = content
    replace_all(checkout, contents)


def main(arguments=None):
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", help="folder of a Megatron-LM checkout")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--revert", dest="action", action="store_const", const=revert,
                     help="take the hooks out")
    how.add_argument("--check", dest="action", action="store_const", const=check,
                     help="change nothing")
    options = parser.parse_args(arguments)
    checkout = Path(options.checkout)
    try:
        diffs = read_diffs(FOLDER)
        name, found = find_diff(checkout, diffs)
        done = (options.action or apply)(checkout, name, diffs[name], found)
    except (DiffError, OSError) as error:
        sys.stderr.write("megatron_paci: {}\n".format(error))
        return 2
    sys.stdout.write(done + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
