"""Writes docs/compatibility.md from the package's tables. Run: python docs/compatibility.py

The flags are those of the installed Megatron's own parser. A unit test fails while the committed
file is not what this prints (tests/unit/test_compatibility.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_paci.arguments import megatron_arguments, paci_arguments  # noqa: E402
from megatron_paci.features import WORKS  # noqa: E402
from megatron_paci.known_arguments import INDIFFERENT, MEGATRON_VERSION  # noqa: E402
from megatron_paci.refused import PACI_RULES  # noqa: E402
from megatron_paci.rules import SELECTION_RULES, Rule  # noqa: E402
from megatron_paci.unproved import UNPROVED  # noqa: E402

PAGE = Path(__file__).with_suffix(".md")
CHECKS = "tests/unit/test_compatibility.py"

INTRODUCTION = f"""# Compatibility

What of Megatron runs under `--pipeline-schedule paci`. Made by `python docs/compatibility.py` from
`megatron_paci/features.py`, `unproved.py`, `refused.py`, `refused_training.py`, `rules.py` and
`known_arguments.py`; all arguments of Megatron-Core {MEGATRON_VERSION} and the few that only 0.18.2
has were gone through. An argument counts here if it touches the pipeline
schedule, the optimizer step, loss scaling, the communication of gradients and weights, collectives
over stages while training runs, what an iteration leaves undone when it returns, or what a layer
keeps between forward and backward.
"""

REFUSED = f"""
## Refused

Before any process group, data set or model is made, all reasons in one message that names the flags
as they were given ([{CHECKS}](../{CHECKS})).

| feature | flags | reason | remedy |
| --- | --- | --- | --- |"""

BEYOND_FLAGS = f"""
What no flag asks for is refused when training begins: multi-module pipelines, which hand `train()`
a communicator or process groups of their own
(`{CHECKS}::test_a_multi_module_pipeline_is_refused`).
"""

UNKNOWN = f"""
## Flags that no table knows

An argument that Megatron's own parser has, no table here knows (a newer Megatron) and a command
line uses is refused; `--paci-accept-unknown-flags` turns that into a warning
(`{CHECKS}::test_a_flag_of_a_newer_megatron_is_refused_unless_accepted`). Flags that a launch script
adds are its own affair.
"""


def flags(names) -> str:
    """Return the flags of arguments as they are typed, the names where no parser has them."""
    known = {**megatron_arguments(), **paci_arguments()}
    typed = (known[name].flag if name in known else f"--{name.replace('_', '-')}" for name in names)
    return ", ".join(f"`{flag}`" for flag in typed)


def row(*cells: str) -> str:
    """Return one line of a table."""
    return "| " + " | ".join(cells) + " |"


def refusal(rule: Rule) -> str:
    """Return the line of a rule, with words in place of what a message fills in."""

    class Words:
        pipeline_schedule = "of another name"

    facts = {"args": Words, "counts": "m", "divisors": "a divisor of m", "flags": "the flag",
             "phases_fault": "a part is no accumulation with a sample, or comes too early",
             "indivisible": "which ones do not, and from which sample on"}
    return row(
        rule.feature,
        flags(rule.arguments),
        rule.reason.format(**facts),
        rule.remedy.format(**facts),
    )


def page() -> str:
    """Return the whole page."""
    lines = [INTRODUCTION, "## Works", "", "| feature | flags | how | proof |",
             "| --- | --- | --- | --- |"]
    for feature in WORKS:
        proofs = ", ".join(f"`{proof}`" for proof in feature.proofs)
        lines.append(row(feature.name, flags(feature.arguments), feature.why, proofs))
    lines += ["", "## Let through with one warning", "",
              "No CPU can run these, and no GPU was at hand: compare with `--pipeline-schedule "
              "1f1b`.", "", "| feature | flags | what is in question |", "| --- | --- | --- |"]
    for feature in UNPROVED:
        lines.append(row(feature.name, flags(feature.arguments), feature.why))
    lines.append(REFUSED)
    lines += [refusal(rule) for rule in (*SELECTION_RULES, *PACI_RULES)]
    lines += [BEYOND_FLAGS, "## No difference", ""]
    for topic, names in INDIFFERENT.items():
        lines += [f"- **{topic}**: {flags(names.split())}"]
    lines.append(UNKNOWN)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
