"""Renews what is generated in README.md and docs/*.md. Run: python docs/pages.py

- Tables, between ``<!-- table: python docs/pages.py NAME -->`` and ``<!-- end of table -->``.
- What ``python -m megatron_paci simulate`` prints: a block that starts with three backquotes and
  ``console`` holds one command behind ``$`` and its whole output.

docs/pictures.py draws the pictures. tests/unit/test_docs.py fails while a page is out of step.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_paci.__main__ import main as megatron_paci  # noqa: E402
from megatron_paci.schedule import StageSchedule  # noqa: E402

TABLE = re.compile(
    r"(<!-- table: python docs/pages\.py (\w+) -->\n)(.*?)(<!-- end of table -->\n)", re.DOTALL
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"\$ ((?:[^\n]*\\\n)*[^\n]*)\n")
PROGRAM = ["python", "-m", "megatron_paci"]
STAGES, ACCUMULATIONS = (2, 4, 8, 16), (1, 2, 4, 8, 16)


def pages() -> list[Path]:
    """Return all pages: the READMEs and what lies in docs/."""
    return [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def rows(*lines: tuple[str, ...]) -> str:
    """Return a table; the first line is its head."""
    head, *body = ("| " + " | ".join(line) + " |\n" for line in lines)
    return head + "| --- " * len(lines[0]) + "|\n" + "".join(body)


def options() -> str:
    """Return the flags of the plugin, from the fields of ``PaciArguments``."""
    from megatron_paci.arguments import add_paci_arguments

    parser = add_paci_arguments(ArgumentParser(add_help=False))
    lines = [("flag", "default", "meaning")]
    for action in parser._actions:
        value = action.metavar or (action.choices and "{" + ",".join(action.choices) + "}") or ""
        flag = f"`{f'{action.option_strings[0]} {value}'.rstrip()}`"
        if isinstance(action.default, bool):
            default = "on" if action.default else "off"
        else:
            default = "" if action.default is None else f"`{action.default}`"
        lines.append((flag, default, " ".join(action.help.split())))
    return rows(*lines)


def hooks() -> str:
    """Return the functions of Megatron that are wrapped, each with the reason."""
    from megatron_paci.hooks import PATCHES

    return rows(
        ("function", "what the hook does"),
        *((f"`{patch.target.replace(':', '.')}`", patch.why) for patch in PATCHES.patches),
    )


def supported() -> str:
    """Return what works, what is let through and what is refused, by name."""
    from megatron_paci.features import WORKS
    from megatron_paci.refused import PACI_RULES
    from megatron_paci.unproved import UNPROVED

    kinds = {
        "works, each with a test": [feature.name for feature in WORKS],
        "let through with a warning: no CPU can run it": [feature.name for feature in UNPROVED],
        "refused before anything is built, with a remedy": [
            rule.feature for rule in PACI_RULES
            if not all(name.startswith("paci_") for name in rule.arguments)
        ],
    }
    return rows(("", "features"), *(
        (kind, "; ".join(dict.fromkeys(names))) for kind, names in kinds.items()
    ))


def drift() -> str:
    """Return the most and the mean drift of stage 0, for numbers of stages and values of a."""
    lines = [("N", *(f"a = {a}" for a in ACCUMULATIONS))]
    for n in STAGES:
        cells = []
        for a in ACCUMULATIONS:
            schedule = StageSchedule(0, n, a)
            window = [schedule.drift(microbatch) for microbatch in range(n * a, (n + 1) * a)]
            cells.append(f"{schedule.drift_bound}, {sum(window) / a:.4g}")
        lines.append((str(n), *cells))
    return rows(*lines)


TABLES: dict[str, Callable[[], str]] = {
    "options": options, "hooks": hooks, "supported": supported, "drift": drift,
}


def commands(text: str) -> Iterator[str]:
    """Yield the command lines in the blocks of a page, without prompts and comments."""
    for _, body in FENCE.findall(text):
        for line in body.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ").partition(" #")[0]
            if line.startswith(("python ", "torchrun ", "make ", "pip ")):
                yield " ".join(line.split())


def simulations(text: str) -> Iterator[list[str]]:
    """Yield the arguments of every ``python -m megatron_paci simulate`` in the blocks of a page."""
    for command in commands(text):
        if command.startswith(f"{' '.join(PROGRAM)} simulate"):
            yield shlex.split(command)[len(PROGRAM):]


def output(arguments: list[str]) -> str:
    """Return what a command prints; pictures are left to docs/pictures.py.

    Raises:
        RuntimeError: It fails.
    """
    while "--picture" in arguments:
        place = arguments.index("--picture")
        arguments = arguments[:place] + arguments[place + 2 :]
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        status = megatron_paci(arguments)
    if status:
        raise RuntimeError(f"{' '.join([*PROGRAM, *arguments])} failed: {errors.getvalue()}")
    return "".join(line.rstrip() + "\n" for line in printed.getvalue().splitlines())


def renewed(text: str) -> str:
    """Return a page with all that is generated made anew."""

    def printed(block: re.Match) -> str:
        command = COMMAND.match(block[2])
        words = shlex.split(command[1].replace("\\\n", " ")) if command else []
        if block[1] != "console" or words[: len(PROGRAM)] != PROGRAM:
            return block[0]
        return f"```console\n{command[0]}{output(words[len(PROGRAM):])}```"

    text = TABLE.sub(lambda found: found[1] + TABLES[found[2]]() + found[4], text)
    return FENCE.sub(printed, text)


def main() -> None:
    """Renew all pages."""
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = renewed(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            sys.stdout.write(f"{page.relative_to(ROOT)}: renewed\n")


if __name__ == "__main__":
    main()
