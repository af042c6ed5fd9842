"""Measures the tables of docs/performance.md. Run: python docs/performance.py TABLE...

Each table is what some benchmarks say (``python -m megatron_paci bench``); their results are kept
as JSON in out/performance, and those that are there already are not measured again. Then the table
is put into the page, with the date, the commit and the commands.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_paci.bench.theory import utilization  # noqa: E402

PAGE = Path(__file__).with_suffix(".md")
FOLDER = ROOT / "out" / "performance"
BENCH = "python -m megatron_paci bench"
LOOP = '--tied-embeddings --megatron-args="--clip-grad 1.0"'
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
MEASURED_STAGES = (2, 4, 8)  # in virtual time; a rank needs 350 MB
SIMULATED_STAGES = (16, 32)
LATENCIES = ("0", "1/20", "1/10", "1/5")  # in forwards
EXTRA = (0, 1, 2)
WITH_LATENCY = f"--latencies {','.join(LATENCIES)} --extra-in-flight {','.join(map(str, EXTRA))}"
SCHEDULES = "--schedules 1f1b,interleaved,paci"
BRIEFLY = "--forward-ms 50 --iterations 5 --repetitions 1"
PARALLEL = {
    "replicas": ("2 replicas", f"--replicas 2 {LOOP}"),
    "tensor": ("tensor parallel 2", f"--tensor 2 {LOOP}"),
    "sharded": (
        f"2 replicas, `{SHARDED}`",
        f'--replicas 2 --tied-embeddings --megatron-args="--clip-grad 1.0 {SHARDED}"',
    ),
}
EMULATED = {
    "n4": ("equal", "--stages 4 --microbatches 4"),
    "n8": ("equal", "--stages 8 --microbatches 4"),
    "n8-m8": ("equal", "--stages 8 --microbatches 8"),
    "uneven": ("0.8, 1, 1.2, 1", "--stages 4 --microbatches 4 --stage-factors 0.8,1,1.2,1"),
    "slow": ("one takes 1.5", "--stages 8 --microbatches 4 --slow-stage 3:1.5"),
}
Results = dict[str, dict[str, Any]]


def rows(*lines: Sequence[str]) -> str:
    """Return a table whose first line is its head."""
    head, *body = lines
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *body))


def shown(value: float | None, decimals: int = 3) -> str:
    """Return a number as the tables have it."""
    return "-" if value is None else f"{value:.{decimals}f}"


def real(results: Results) -> str:
    """Return the table of tokens per second of a small GPT."""
    lines = [("microbatches", "schedule", "tokens/s", "over 1F1B", "formula", "simulator",
              "measured / simulator")]
    for count, schedules in results["real"]["microbatches"].items():
        for name, found in schedules.items():
            if "reason" not in found:
                ratios = (shown(found[key]) for key in (
                    "ratio", "ratio_theory", "ratio_predicted", "of_predicted"))
                lines.append((count, name, f"{found['tokens_per_second']:.0f}", *ratios))
    return rows(*lines)


def emulated(results: Results) -> str:
    """Return the table of emulated devices."""
    lines = [("stages", "microbatches", "time of the stages", "1F1B", "interleaved, v=2", "PACI",
              "PACI over 1F1B", "besides passes, per iteration of PACI")]

    def beside(value: float | None, theory: float | None) -> str:
        return shown(value) if theory is None else f"{shown(value)} ({shown(theory)})"

    for name, (times, _) in EMULATED.items():
        found = results[name]["schedules"]
        cells = []
        for schedule in ("1f1b", "interleaved", "paci"):
            one = found[schedule]
            cell = beside(one["utilization"], one["theory"])
            if other := one.get("instead"):
                cell += (f"; with {other['microbatches']} microbatches "
                         f"{beside(other['utilization'], other['theory'])}")
            cells.append(cell)
        paci = found["paci"]
        run = results[name]["parameters"]["runs"]["paci"]
        lines.append((str(run["stages"]), str(run["microbatches"]), times, *cells,
                      beside(paci["ratio"], paci["ratio_theory"]), besides_passes(paci)))
    return rows(*lines)


def besides_passes(found: dict[str, Any]) -> str:
    """Return where the time of the slowest stage went that is neither forward nor backward."""
    busy = found["utilization_by_stage"]
    spent = dict(found["seconds_by_cause"][busy.index(max(busy))])
    step, other = spent.pop("step"), spent.pop("other")
    waits = sum(seconds for cause, seconds in spent.items() if cause not in ("F", "B"))
    return (f"{1e3 * step:.0f} ms update, {1e3 * waits:.0f} ms waiting for messages, "
            f"{1e3 * other:.0f} ms other")


def loop(results: Results) -> str:
    """Return the table of the whole training loop in virtual time."""
    lines = [("stages", "microbatches", "1F1B", "m/(m+N-1)", "interleaved, v=2", "2m/(2m+N-1)",
              "PACI", "collectives over stages per iteration: 1F1B, PACI")]
    runs = {}
    for run in (run for result in results.values() for run in result["runs"]):
        given = run["parameters"]
        size = given["stages"], given["microbatches"]
        runs.setdefault(size, {})[given["schedule"]] = run
    for (stages, count), own in runs.items():
        synced = "simulated" if "simulated" in own["paci"] else ", ".join(
            f"{own[name]['cross_stage_collectives']:g}" for name in ("1f1b", "paci"))
        busy = {name: shown(min(run["utilization"]) if "utilization" in run else None)
                for name, run in own.items()}
        formula = {name: shown(float(utilization(name, stages, count))) for name in own}
        lines.append((str(stages), str(count), busy["1f1b"], formula["1f1b"],
                      busy["interleaved"], formula["interleaved"], busy["paci"], synced))
    return rows(*lines)


def parallel(results: Results) -> str:
    """Return the table of PACI together with other parallelism, in virtual time."""
    lines = [("four stages, four microbatches, eight ranks", "1F1B", "PACI",
              "collectives over stages per iteration: 1F1B, PACI")]
    for name, (words, _) in PARALLEL.items():
        both = results[name]["runs"]
        busy = (shown(min(run["utilization"])) for run in both)
        synced = ", ".join(f"{run['cross_stage_collectives']:g}" for run in both)
        lines.append((words, *busy, synced))
    return rows(*lines)


def latency(results: Results) -> str:
    """Return the table of message latency: PACI measured, with many stages simulated."""
    lines = [("stages", "latency", *(f"PACI, s={extra}" for extra in EXTRA), "PACI is",
              "1F1B, m=32, simulated", "interleaved, v=2, m=32, simulated")]
    busy, how = {}, {}
    for result in results.values():
        for run in result["runs"]:
            given = run["parameters"]
            key = (given["schedule"], given["stages"], given["latency"], given["extra_in_flight"])
            busy[key] = min(run["utilization"])
            how[key] = "simulated" if "simulated" in run else "measured"
    for stages in (*MEASURED_STAGES, *SIMULATED_STAGES):
        for time in LATENCIES:
            ours = [("paci", stages, time, extra) for extra in EXTRA]
            theirs = [(name, stages, time, 0) for name in ("1f1b", "interleaved")]
            lines.append((str(stages), f"{float(Fraction(time)):.0%}",
                          *(shown(busy[key]) for key in ours), how[ours[0]],
                          *(shown(busy[key]) for key in theirs)))
    return rows(*lines)


def scale(results: Results) -> str:
    """Return the table of the time of an iteration against stages and microbatches in flight."""
    lines = [("stages", "microbatches per iteration", "in flight on stage 0",
              "1F1B: ms per iteration", "PACI: ms per iteration", "PACI: utilization",
              "PACI: ms over theory per microbatch")]
    for result in results.values():
        base = {(row["stages"], row["microbatches"]): row for row in result["rows"]
                if row["schedule"] == "1f1b"}
        for row in result["rows"]:
            if row["schedule"] == "paci":
                stages, count, extra = (
                    row[key] for key in ("stages", "microbatches", "extra_in_flight"))
                other = base.get((stages, count))
                lines.append((
                    str(stages), str(count), str(stages + extra * (stages - 1)),
                    shown(other and other["iteration_ms"], 0), shown(row["iteration_ms"], 0),
                    shown(row["utilization"]), shown(row["overhead_ms"], 1)))
    return rows(*lines)


@dataclass(frozen=True)
class Table:
    """How a table is made."""

    text: Callable[[Results], str]
    benchmarks: dict[str, str]
    """Name of a result to the benchmark and its flags."""


TABLES = {
    "real": Table(real, {"real": "real"}),
    "emulated": Table(
        emulated, {name: f"emulated {flags}" for name, (_, flags) in EMULATED.items()}
    ),
    "loop": Table(loop, {
        f"n{n}": f"virtual --stages {n} --microbatches 1,2,4,8,16 {SCHEDULES} {LOOP} "
        "--timeout 1800"
        for n in MEASURED_STAGES
    } | {
        "simulated": f"virtual --stages 16,32 --microbatches 1,4,16,32,64 {SCHEDULES} --simulate",
    }),
    "parallel": Table(parallel, {
        name: f"virtual --stages 4 --microbatches 4 --schedules 1f1b,paci {flags}"
        for name, (_, flags) in PARALLEL.items()
    }),
    "latency": Table(latency, {
        f"n{n}": f"virtual --stages {n} --microbatches 4 --schedule paci "
        f"{WITH_LATENCY}"
        for n in MEASURED_STAGES
    } | {
        "simulated": "virtual --stages 16,32 --microbatches 4 --schedule paci "
        f"{WITH_LATENCY} --simulate",
        "others": "virtual --stages 2,4,8,16,32 --microbatches 32 --schedules 1f1b,interleaved "
        f"--latencies {','.join(LATENCIES)} --simulate",
    }),
    "scale": Table(scale, {
        "stages": f"scale --stages 2,4,8,16 {BRIEFLY}",
        "in-flight": f"scale --stages 8 --extra-in-flight 0,1,2 --schedules paci {BRIEFLY}",
    }),
}
BLOCK = re.compile(
    r"(<!-- table: python docs/performance\.py (\w+) -->\n)(.*?)(<!-- end of table -->\n)",
    re.DOTALL,
)


def measured(name: str) -> str:
    """Return a table as the page has it; measures what is missing.

    Raises:
        subprocess.CalledProcessError: A benchmark failed; it has said why.
    """
    table = TABLES[name]
    results, commands = {}, []
    for each, flags in table.benchmarks.items():
        path = FOLDER / f"{name}-{each}.json"
        if not path.exists():
            FOLDER.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "megatron_paci", "bench", *shlex.split(flags)]
            subprocess.run([*command, "--json", str(path)], cwd=ROOT, check=True)
        results[each] = json.loads(path.read_text())
        commands.append(f"{BENCH} {flags} --json out/performance/{path.name}\n")
    date = max(result["date"] for result in results.values())[:10]
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    head = f"Measured on {date} at commit {commit.stdout.strip()}:"
    return f"{head}\n\n```\n{''.join(commands)}```\n\n{table.text(results)}"


def main(names: Sequence[str]) -> int:
    """Put the tables with these names into the page; return the exit status."""
    if not names or not set(names) <= TABLES.keys():
        sys.stderr.write(f"name tables: {' '.join(TABLES)}\n")
        return 2
    made = {name: measured(name) for name in names}
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        BLOCK.sub(lambda found: f"{found[1]}{made.get(found[2], found[3])}{found[4]}", text),
        encoding="utf-8",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
