"""What is run: the same command under several schedules. Pure."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_paci.compare.short import Short
from megatron_paci.simulate.schedules import LABELS
from megatron_paci.version import versions

SCHEDULES = ("1f1b", "interleaved", "paci")
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
OWN_FLAGS = {
    "--pipeline-schedule": "--schedules",
    "--paci-accum": "--accum",
    "--paci-record": "--output",
    "--paci-trace": "--output",
    CHUNKS: "--chunks",
    "--num-layers-per-virtual-pipeline-stage": "--chunks",
}
"""Flags that a comparison gives to the script itself, and its own flag for each."""
RUNS = "runs"
PER_RUN = ("--save", "--tensorboard-dir", "--wandb-save-dir")
"""Folders that runs may not share."""


class PlanError(ValueError):
    """A comparison that makes no sense; one line per reason."""


@dataclass(frozen=True)
class Run:
    """One of the runs that are compared."""

    name: str
    schedule: str
    label: str
    added: list[str]
    """Flags that this run has besides those of all, recording apart."""
    command: list[str]
    folder: str

    @property
    def path(self) -> Path:
        """Folder of the run."""
        return Path(self.folder)

    @property
    def record(self) -> Path:
        """Folder of its records."""
        return self.path / "record"

    @property
    def trace(self) -> Path:
        """Folder of its traces."""
        return self.path / "trace"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A comparison."""

    script: str
    arguments: list[str]
    """Of the script, the same in all runs."""
    num_ranks: int
    device: str
    runs: list[Run] = field(default_factory=list)
    short: Short | None = None
    """What is done if it is about loss curves alone."""

    def identity(self, run: Run) -> dict[str, Any]:
        """Return what makes a run the same one: command, script and versions."""
        try:
            digest = hashlib.sha256(Path(self.script).read_bytes()).hexdigest()
        except OSError:
            digest = None
        return {"command": run.command, "script": digest, "versions": versions()}

    def write(self, path: Path) -> None:
        """Write the plan as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read a plan; the folders of its runs are those beside it, wherever it lies now.

        Raises:
            PlanError: There is none, or it cannot be read.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            runs = [
                Run(**{**run, "folder": str(path.parent / RUNS / run["name"])})
                for run in found["runs"]
            ]
            short = Short(**found["short"]) if found.get("short") else None
            return cls(**{**found, "runs": runs, "short": short})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PlanError(
                f"{path} is no plan of a comparison ({error}); give the folder of one, made with "
                "or without --print-commands"
            ) from None


def make_plan(
    script: str,
    arguments: Sequence[str],
    *,
    output: Path,
    num_ranks: int,
    device: str,
    schedules: Sequence[str] = SCHEDULES,
    accum: Sequence[int] = (),
    chunks: int = 2,
    only_for: Mapping[str, Sequence[str]] | None = None,
    launcher: Sequence[str] | None = None,
    trace: bool = True,
    short: Short | None = None,
) -> Plan:
    """Return the plan of a comparison.

    Args:
        output: Folder of the comparison.
        accum: PACI's accumulations, a run each; none for its default.
        chunks: Model chunks per stage of the interleaved schedule.
        only_for: Flags of the script for one schedule alone.
        launcher: What starts ``num_ranks`` processes of what follows it, ``-m megatron_paci run``;
            None for torchrun on this machine.
        trace: Whether runs are traced.
        short: What a short comparison does; ``arguments`` are those made for it.

    Raises:
        PlanError: With every reason.
    """
    problems = [f"--schedules {name}: unknown; take some of {', '.join(SCHEDULES)}"
                for name in schedules if name not in SCHEDULES]
    given = {word.split("=")[0] for word in arguments}
    problems += [f"{flag}: a comparison sets it for each run; drop it, and see compare {own}"
                 for flag, own in OWN_FLAGS.items() if flag in given]
    if not Path(script).is_file():
        problems.append(f"the launch script {script} does not exist; give the path of e.g. "
                        "Megatron-LM's pretrain_gpt.py")
    problems += [f"--only-for {name}: is not among the schedules; take one of "
                 f"{', '.join(schedules)}" for name in only_for or {} if name not in schedules]
    if problems:
        raise PlanError("\n".join(problems))
    launcher = launcher or [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(num_ranks),
    ]
    start = [*launcher, "-m", "megatron_paci", "run", *(["--device", "cpu"] * (device == "cpu"))]
    runs = []
    variants = _variants(schedules, accum, chunks)
    if short is not None:
        variants = [_seeded(variant, seed, short.seeds[0])
                    for seed in short.seeds for variant in variants]
    for name, schedule, label, flags in variants:
        flags += (only_for or {}).get(schedule, [])
        folder = output / RUNS / name
        flags += own_folders(arguments, folder)
        kept = ["--paci-record", str(folder / "record")]
        kept += ["--paci-trace", str(folder / "trace")] * trace
        command = [*start, script, *arguments, *flags, *kept]
        runs.append(Run(name, schedule, label, flags, command, str(folder)))
    return Plan(script=script, arguments=list(arguments), num_ranks=num_ranks, device=device,
                runs=runs, short=short)


Variant = tuple[str, str, str, list[str]]
"""Name, schedule, label and flags of a run."""


def _seeded(variant: Variant, seed: int, own: int) -> Variant:
    """Return a variant with a seed; with the script's own one it stays the same run."""
    name, schedule, label, flags = variant
    if seed == own:
        return name, schedule, label, [*flags]
    return f"{name}-seed{seed}", schedule, f"{label}, seed {seed}", [*flags, "--seed", str(seed)]


def _variants(schedules: Sequence[str], accum: Sequence[int], chunks: int) -> list[Variant]:
    """Return (name, schedule, label, flags) of each run."""
    found = []
    for schedule in dict.fromkeys(schedules):
        flags = ["--pipeline-schedule", schedule]
        if schedule == "interleaved":
            flags += [CHUNKS, str(chunks)]
        if schedule == "paci" and accum:
            found += [
                (f"paci-a{a}", schedule, f"{LABELS[schedule]}, a={a}",
                 [*flags, "--paci-accum", str(a)])
                for a in dict.fromkeys(accum)
            ]
        else:
            label = LABELS[schedule]
            found.append((schedule, schedule, label[0].upper() + label[1:], flags))
    return found


def own_folders(arguments: Sequence[str], folder: Path) -> list[str]:
    """Return flags that keep runs out of each other's folders; of a repeated flag the last wins."""
    given = {word.split("=")[0] for word in arguments}
    return [
        text for flag in PER_RUN if flag in given
        for text in (flag, str(folder / flag.removeprefix("--")))
    ]
