"""Measures the tables of docs/performance.md. Run: python docs/performance.py [FOLDER]

Every run is real Megatron training on this machine's CPUs, in virtual time (see
``python -m megatron_paci bench virtual --help``). FOLDER keeps the results as JSON
(default: out/performance); runs that are there already are not repeated.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_paci.bench.virtual import VirtualRun, measure  # noqa: E402
from megatron_paci.schedule import StageSchedule  # noqa: E402
from megatron_paci.simulate.figures import Memory  # noqa: E402
from megatron_paci.simulate.figures import measure as simulated  # noqa: E402
from megatron_paci.simulate.schedules import paci  # noqa: E402
from megatron_paci.simulate.timing import Costs  # noqa: E402

STAGES = (2, 4, 8)
MICROBATCHES = (1, 2, 4, 8, 16)
LATENCIES = ("0", "1/20")  # in forwards
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
# Together with other parallelism, four stages and four microbatches: name, in words, parameters.
OTHERS = (
    ("dp", "2 replicas", {"replicas": 2}),
    ("tp", "tensor parallel 2", {"tensor": 2}),
    (
        "sharded",
        f"2 replicas, `{SHARDED}`",
        {"replicas": 2, "megatron_args": f"--clip-grad 1.0 {SHARDED}"},
    ),
)


def planned(stages: int) -> dict[str, VirtualRun]:
    """Return the runs with a number of stages, by name: tied embeddings, clipping, all logging."""
    runs = {}
    for microbatches in MICROBATCHES:
        for schedule in ("1f1b", "interleaved", "paci"):
            if schedule == "interleaved" and microbatches % stages:
                continue  # Megatron's interleaved schedule needs a multiple of the stages
            for latency in LATENCIES if schedule == "paci" else LATENCIES[:1]:
                name = f"{schedule}-n{stages}-m{microbatches}-l{latency.replace('/', 'of')}"
                runs[name] = VirtualRun(
                    stages=stages, microbatches=microbatches, schedule=schedule, latency=latency,
                    accum=microbatches if schedule == "paci" else None, tied_embeddings=True,
                    iterations=20, megatron_args="--clip-grad 1.0",
                )
    return runs


def planned_others() -> dict[str, VirtualRun]:
    """Return the runs with eight ranks in four stages, by name."""
    defaults = {"tied_embeddings": True, "iterations": 20, "megatron_args": "--clip-grad 1.0"}
    return {
        f"{schedule}-{name}": VirtualRun(
            stages=4, microbatches=4, schedule=schedule,
            accum=4 if schedule == "paci" else None, **defaults | parameters,
        )
        for name, _, parameters in OTHERS
        for schedule in ("1f1b", "paci")
    }


def measured(runs: dict[str, VirtualRun], folder: Path) -> dict[str, dict]:
    """Return the results of runs with the same number of ranks; ``folder`` keeps them."""
    missing = {n: run for n, run in runs.items() if not (folder / f"{n}.json").exists()}
    if missing:
        with tempfile.TemporaryDirectory() as scratch:
            found = measure(list(missing.values()), folder=Path(scratch), seconds=1800)
        for name, result in zip(missing, found):
            (folder / f"{name}.json").write_text(json.dumps(result, indent=1))
    return {n: json.loads((folder / f"{n}.json").read_text()) for n in runs}


def print_others(results: dict[str, dict]) -> None:
    """Print the table of PACI together with other parallelism."""
    print("| four stages, four microbatches, eight ranks | 1F1B | PACI | "
          "collectives over stages per iteration: 1F1B, PACI |")
    print("| --- " * 4 + "|")
    for name, words, _ in OTHERS:
        both = [results[f"{schedule}-{name}"] for schedule in ("1f1b", "paci")]
        busy = " | ".join(f"{min(result['utilization']):.3f}" for result in both)
        syncs = ", ".join(f"{result['cross_stage_collectives']:g}" for result in both)
        print(f"| {words} | {busy} | {syncs} |")
    print()


def with_more_in_flight(stages: int, latency: float, *, per_link: int, everywhere: int) -> float:
    """Return the utilization of the worst stage with more microbatches in flight (simulated).

    Args:
        per_link: More for each link between a stage and the last one.
        everywhere: More on every stage alike, as if the pipeline had so many stages more.
    """
    orders = [StageSchedule(s, stages + everywhere, 1, per_link) for s in range(stages)]
    figures = simulated(
        lambda iterations: paci(orders, 1, iterations=iterations),
        Costs.equal(stages, latency=latency), Memory.in_microbatches(stages), iterations=40,
    )
    return float(min(figures.utilization))


def main(folder: Path) -> None:
    """Measure what is missing and print the tables as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for stages in STAGES:
        results |= measured(planned(stages), folder)
    others = measured(planned_others(), folder)
    print("| stages | microbatches | 1F1B | m/(m+N-1) | interleaved, v=2 | 2m/(2m+N-1) | PACI | "
          "PACI, latency 5% | collectives over stages per iteration: 1F1B, PACI |")
    print("| --- " * 9 + "|")
    for n in STAGES:
        for m in MICROBATCHES:
            def worst(schedule: str, latency: str = "0", n: int = n, m: int = m) -> str:
                result = results.get(f"{schedule}-n{n}-m{m}-l{latency}")
                return f"{min(result['utilization']):.3f}" if result else "-"

            syncs = [results[f"{s}-n{n}-m{m}-l0"]["cross_stage_collectives"]
                     for s in ("1f1b", "paci")]
            print(f"| {n} | {m} | {worst('1f1b')} | {m / (m + n - 1):.3f} | "
                  f"{worst('interleaved')} | {2 * m / (2 * m + n - 1):.3f} | {worst('paci')} | "
                  f"{worst('paci', '1of20')} | {syncs[0]:g}, {syncs[1]:g} |")
    print()
    print_others(others)
    print("| stages | latency | as is | one more everywhere | `--paci-extra-in-flight 1` |")
    print("| --- " * 5 + "|")
    for n in STAGES:
        for latency in (0.05, 0.2):
            cells = [
                with_more_in_flight(n, latency, per_link=link, everywhere=all_stages)
                for link, all_stages in ((0, 0), (0, 1), (1, 0))
            ]
            print(f"| {n} | {latency:.0%} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "out" / "performance")
