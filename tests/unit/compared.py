"""Made-up records and traces of a run, as the plugin writes them."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_paci.compare.records import run_figures
from megatron_paci.simulate.orders import Work
from megatron_paci.simulate.schedules import plan
from megatron_paci.simulate.timing import Costs, timeline
from megatron_paci.timeline import Span
from megatron_paci.trace_file import TraceWriter

VERSIONS = {"python": "3.12", "torch": "2", "megatron-core": "0.19.2", "megatron_paci": "0"}
LOSSES, ENDS = (8.0, 7.0, 6.0, 5.0, 4.0), (1.0, 2.0, 3.0, 3.5, 4.0)


def record(stage, *, schedule="paci", losses=LOSSES, ends=ENDS, rank=None, scale=1, **facts):
    """The record of a rank of two stages with 4 microbatches; losses are those of the last stage.

    ``scale`` multiplies its bytes.
    """
    last = stage == 1
    run = {
        "rank": stage if rank is None else rank, "stage": stage, "num_stages": 2, "replica": 0,
        "schedule": schedule, "accumulation": 4 if schedule == "paci" else None,
        "chunks": 2 if schedule == "interleaved" else 1, "tensor_parallel": 1, "data_parallel": 1,
        "context_parallel": 1, "num_microbatches": 4, "extra_in_flight": 0,
        "defer_step": False, "sequence_length": 100, "seed": 1,
        "device": "cpu", "versions": VERSIONS, **facts,
    }
    return {
        "run": run,
        "losses": [{"lm loss": loss} if last else {} for loss in losses],
        "grad_norms": [None] * len(losses),
        "seconds_at_end": list(ends),
        "samples": [8] * len(losses),
        "counted_iterations": min(3, len(losses)),
        "evaluations": [
            {"after_iterations": len(losses), "data_set": name,
             "losses": {"lm loss": loss} if last else {}}
            for name, loss in (("validation", 5.5), ("validation", 4.5), ("test", 4.6))
        ],
        "bytes": {"parameters": 4_000_000 * scale, "gradients": 4_000_000 * scale,
                  "optimizer": 8_000_000 * scale,
                  "activations_peak": (2 - stage) * 1_500_000 * scale},
        "paci": {"drift_max": 1 - stage, "drift_bound": 1 - stage, "in_flight_max": 2 - stage,
                 "drift_counts": {"0": 15 + 5 * stage, **({} if stage else {"1": 5})}}
        if schedule == "paci" else None,
    }


def figures(schedule="paci", label=None, **changes):
    """The figures of a run of two stages, as a report has them."""
    found = run_figures([record(stage, schedule=schedule, **changes) for stage in range(2)])
    return found | {"label": label or schedule, "predicted_seconds": None, "virtual": {},
                    "trace": {}, "measured_seconds": None}


def write_records(folder: Path, schedule: str, **changes) -> None:
    """Write the records of a run of two stages."""
    folder.mkdir(parents=True, exist_ok=True)
    for stage in range(2):
        text = json.dumps(record(stage, schedule=schedule, **changes))
        (folder / f"rank{stage}.json").write_text(text)


def write_traces(folder: Path, schedule: str, *, iterations=5, microbatches=4) -> None:
    """Write the traces of a run of two stages, forwards of 1 s and backwards of 2 s, simulated."""
    found = plan(schedule, 2, microbatches, iterations=iterations)
    events = timeline(found.orders, found.path, Costs.equal(2, step=0.5),
                      joint_steps=found.joint_steps)
    for stage in range(2):
        spans, free, updates = [], 0.0, 0
        for event in (event for event in events if event.stage == stage):
            start, end, work = float(event.start), float(event.end), event.task.work
            kind = "STEP" if work is Work.STEP else work.value
            if start > free:
                spans.append(Span("wait", free, start, {"message": None}))
            facts = {} if kind == "STEP" else {
                "stream": 0, "microbatch": event.task.index, "chunk": event.task.chunk}
            spans.append(Span(kind, start, end, facts))
            free = end
            if kind == "STEP":
                updates += 1
                spans.append(Span("iteration", end, end, {"number": updates}))
        writer = TraceWriter(folder, {
            "rank": stage, "stage": stage, "num_stages": 2, "replica": 0, "schedule": schedule,
            "accumulation": None, "started": 1000.0})
        writer.write(spans)
        writer.close()


def write_runs(folder: Path) -> None:
    """Write records and traces of a run of each schedule; PACI is 1.25 times as fast."""
    for schedule, ends in (("1f1b", ENDS), ("interleaved", ENDS),
                           ("paci", (1.0, 2.0, 3.0, 3.4, 3.8))):
        write_records(folder / schedule / "record", schedule, ends=ends)
        write_traces(folder / schedule / "trace", schedule)
