"""Writes docs/paper.md: printed tables of two papers beside ours. Run: python docs/paper.py

The papers are that of PACI (arXiv 2606.07881) and of zero bubble (2401.10241). Ours are simulated
from the orders in ``megatron_paci.simulate``; nothing is measured here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paper_printed import (  # noqa: E402
    PRINTED_NAMES,
    SCHEDULES,
    SETTINGS,
    STAGES,
    TRAINING,
    Run,
    Setting,
)

from megatron_paci.simulate.figures import Memory, measure, peak  # noqa: E402
from megatron_paci.simulate.models import static_bytes  # noqa: E402
from megatron_paci.simulate.orders import Work  # noqa: E402
from megatron_paci.simulate.schedules import plan  # noqa: E402
from megatron_paci.simulate.timing import Costs, timeline  # noqa: E402


@cache
def iteration_time(
    name: str, stages: int, microbatches: int, chunks: int, times: tuple[int, ...]
) -> float:
    """Return the time of an iteration, in the unit of ``times``.

    Of PACI that of as many microbatches in a filled stream, of the others the longest time that a
    stage takes from its first pass to its last: what the zero-bubble paper counts.
    """
    costs = Costs.equal(stages, forward=times[0], backward_input=times[1],
                        backward_weight=times[2], latency=times[3])
    if name == "paci":
        figures = measure(lambda count: plan("paci", stages, 1, iterations=count), costs,
                          Memory.in_microbatches(stages), iterations=4 * stages)
        return float(figures.iteration_time) * microbatches
    made = plan(name, stages, microbatches, chunks=chunks)
    first, last = {}, {}
    for event in timeline(made.orders, made.path, costs):
        if event.task.work is not Work.STEP:
            first.setdefault(event.stage, event.start)
            last[event.stage] = event.end
    return float(max(last[stage] - first[stage] for stage in first))


def runs() -> Iterator[tuple[Setting, Run]]:
    """Yield all rows of the large-scale tables."""
    for setting in SETTINGS:
        for run in setting.runs:
            yield setting, run


def time_of(name: str, setting: Setting, run: Run) -> float:
    """Return the time of an iteration in microseconds."""
    return iteration_time(name, setting.stages, run.microbatches, setting.chunk_layers, run.times)


def bubble_rate(name: str, setting: Setting, run: Run) -> float:
    """Return the share of an iteration that is not computing."""
    return 1 - run.microbatches * sum(run.times[:3]) / time_of(name, setting, run)


def throughput(name: str, setting: Setting, run: Run) -> float:
    """Return samples per GPU and second."""
    samples = setting.microbatch_size * run.microbatches
    return samples / (setting.stages * time_of(name, setting, run) / 1e6)


def memory_gb(name: str, setting: Setting, run: Run) -> float:
    """Return GB (10^9 bytes) of the fullest stage."""
    model, n = setting.model, setting.stages
    made = plan(name, n, run.microbatches, chunks=setting.chunk_layers)
    layer = setting.microbatch_size * model.layer_activations(width=2, keep_scores=True)
    # The authors' schedules count on 32 of a layer's 34 h + 5 a s bytes for the weights' gradient.
    kept = setting.microbatch_size * model.sequence * 32 * model.hidden
    found = []
    for stage, order in enumerate(made.orders):
        first, last = stage == 0, stage == n - 1
        layers = setting.chunk_layers - first - last
        weights = model.stage_parameters(layers, first=first, last=last)
        static = sum(static_bytes(weights, width=2, replicas=1,
                                  distributed_optimizer=False).values())
        edges = model.edge_activations(first=first, last=last, width=2)
        found.append(
            static + peak(order, layers * layer + setting.microbatch_size * edges[0],
                          layers * kept, made.chunks) + setting.microbatch_size * edges[1]
        )
    return float(max(found)) / 1e9


def table(head: str, rows: Iterator[list[str]] | list[list[str]]) -> list[str]:
    """Return a Markdown table; ``head`` has its columns between bars."""
    columns = head.count("|") + 1
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {head} |", "| --- " * columns + "|", *lines, ""]


def training_rows() -> Iterator[list[str]]:
    """Yield the rows of the PACI paper's speed-ups beside the theory."""
    for batch, m, flush, paci, printed in TRAINING:
        theory = (iteration_time("1f1b", STAGES, m, 1, (1, 1, 1, 0))
                  / iteration_time("paci", STAGES, m, 1, (1, 1, 1, 0)))
        yield [str(batch), str(m), str(batch // m), f"{theory:g}", f"{printed}",
               f"{flush / paci:.2f}", f"{printed - theory:+.2f}",
               f"{flush * m / (m + STAGES - 1):.1f}", f"{paci}"]


def bubble_rows() -> Iterator[list[str]]:
    """Yield printed and simulated bubble rates."""
    for setting, run in runs():
        cells = [setting.name, str(setting.stages), str(run.microbatches)]
        for name in ("1f1b", "zb-h1"):
            ours = round(bubble_rate(name, setting, run), 4)
            cells += [f"{run.bubble[name]:.4f}", f"{ours:.4f}", f"{ours - run.bubble[name]:+.4f}"]
        yield cells


def throughput_rows(*, scaled: bool) -> Iterator[list[str]]:
    """Yield printed and calculated throughput, with the difference.

    Args:
        scaled: Whether ours are multiplied such that 1F1B has its printed value.
    """
    for setting, run in runs():
        factor = 1.0
        if scaled:
            factor = run.throughput["1f1b"] / throughput("1f1b", setting, run)
        cells = [setting.name, str(run.microbatches)]
        for name in SCHEDULES:
            printed, ours = run.throughput[name], factor * throughput(name, setting, run)
            cells.append(f"{printed:g} / {ours:.3g} / {ours / printed - 1:+.1%}")
        yield cells


def memory_rows() -> Iterator[list[str]]:
    """Yield printed and calculated memory, and each as a multiple of 1F1B's."""
    for setting in SETTINGS:
        run = setting.runs[0]
        base = memory_gb("1f1b", setting, run)
        cells = [setting.name]
        for name in ("1f1b", "zb-h2", "zb-h1", "interleaved"):
            printed, ours = setting.memory[name], memory_gb(name, setting, run)
            cells.append(f"{printed} / {ours:.1f} / {ours - printed:+.1f}")
            if name != "1f1b":
                cells.append(f"{printed / setting.memory['1f1b']:.2f} / {ours / base:.2f}")
        yield cells


INTRODUCTION = """\
# The papers' tables beside ours

Made by `python docs/paper.py`. *Printed* is what a paper says, *ours* what the simulator of this
project (`megatron_paci/simulate`, from the orders that the engine runs) makes of the stated inputs.
Nothing here was measured by us, and nothing is fitted: where a number is scaled, the text says by
which.

## 1. Speed-up of PACI on eight stages (arXiv 2606.07881)

GPT-2 Medium, 8 stages, `a = m`. *Theory* is the simulated time of an iteration under 1F1B over that
under PACI, for stages of equal cost and messages that take no time; it equals `(m + N - 1) / m`.
*From hours* divides the printed hours. *Busy hours* are the printed hours of the flush times
`m / (m + N - 1)`: what it would take without its bubble.
"""

AFTER_TRAINING = """\
With microbatches of 16 the measured gain is within 2% of theory. With microbatches of 32 it is far
below: PACI took longer than the busy hours of the flush, so its passes themselves were slower
there. The paper gives no reason.

## 2. Large scale (zero-bubble paper, arXiv 2401.10241)

Inputs: the profiled times of a forward, both gradients and a message, in microseconds, that the
authors' published code lists for these twelve runs
(`github.com/sail-sg/zero-bubble-pipeline-parallelism`, file
`megatron/core/pipeline_parallel/v_schedule.py` at commit 5234a81). All stages take equally long.

### Bubble rates

`1 - m (F + B + W) / T` with `T` the longest time that a stage takes from its first pass to its
last. Their ZB-1p comes out of a search within the memory of 1F1B; ours is the fixed order ZB-H1.
"""

BEFORE_THROUGHPUT = """\
{matches} of the {count} printed rates come out to the last digit.

### Throughput, samples per GPU and second

Each cell: printed / ours / difference. Ours is `b m / (N T)` with the same `T` (for PACI the time
of `m` microbatches in a filled stream, messages included). Optimizer steps, their communication and
whatever else a real iteration does are not in the profiled times, so ours are upper bounds.
ZB-2p is the result of a search in the paper, ZB-H2 here; interleaved has one layer per chunk, as in
the authors' `interleave.py`.
"""

BEFORE_SCALED = """\
The same, with every row of ours multiplied by one number, such that 1F1B has its printed value.
What differs then is what the other schedules gained or lost beyond their bubble; interleaved loses
most, since it sends more messages and works in smaller pieces than the profiled ones.

The PACI column of the PACI paper is a projection, not a measurement: in {projected} of {rows} rows
it is the printed value of 1F1B times `(m + N - 1) / m`, rounded. So that it agrees here says that
two calculations are alike, not that anybody ran it.
"""

BEFORE_MEMORY = """\
### Memory of the fullest stage, GB

Each cell: printed / ours / difference; then printed / ours as a multiple of 1F1B. PACI is 1F1B's,
stage for stage. Ours: 18 bytes per weight (16-bit weights, fp32 gradients, Adam) and, per
microbatch and layer, `s b h (34 + 5 a s / h)` bytes (arXiv 2205.05198), of which `32 s b h` stay
for the gradient of the weights (from the authors' code). Assumed: one layer less on the first and
on the last stage (22 = 8 x 3 - 2 and so on), the vocabulary of GPT-2, 10^9 bytes per GB.
"""

AFTER_MEMORY = """\
Not derivable from what is printed: the zero-bubble paper's order for ZB-2p (a search result) and
its bubble rate, how far communication overlaps, the time of optimizer steps, and what memory
besides weights and activations the framework takes.
"""


def projected(setting: Setting, run: Run) -> float:
    """Return 1F1B's printed throughput without the bubble of its formula, as rounded as PACI's."""
    m = run.microbatches
    return round(run.throughput["1f1b"] * (m + setting.stages - 1) / m + 1e-9, 2)


def text() -> str:
    """Return the document."""
    bubbles = list(bubble_rows())
    differences = [cells[column] for cells in bubbles for column in (5, 8)]
    schedule_columns = " | ".join(PRINTED_NAMES[name] for name in SCHEDULES)
    return "\n".join([
        INTRODUCTION,
        *table("batch | m = a | microbatch | theory | printed | from hours | printed - theory | "
               "busy hours of the flush | hours of PACI", training_rows()),
        AFTER_TRAINING,
        *table("model | stages | m | 1F1B printed | ours | difference | ZB-1p printed | ours "
               "(ZB-H1) | difference", bubbles),
        BEFORE_THROUGHPUT.format(
            matches=sum(float(text) == 0 for text in differences), count=len(differences)
        ),
        *table(f"model | m | {schedule_columns}", throughput_rows(scaled=False)),
        BEFORE_SCALED.format(
            projected=sum(projected(*row) == row[1].throughput["paci"] for row in runs()),
            rows=len(bubbles),
        ),
        *table(f"model | m | {schedule_columns}", throughput_rows(scaled=True)),
        BEFORE_MEMORY,
        *table("model | 1F1B | ZB-2p (ours: ZB-H2) | multiple | ZB-1p (ours: ZB-H1) | multiple | "
               "interleaved | multiple", memory_rows()),
        AFTER_MEMORY,
    ])


if __name__ == "__main__":
    Path(__file__).with_name("paper.md").write_text(text())
