"""From the records of training runs (``--paci-record``) to the figures one compares.

Pure: reads JSON and computes, without torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_paci.rank_files import rank_files

Record = Mapping[str, Any]
LOSS = "lm loss"
# A single iteration's loss says more about its samples than about the model.
FINAL_ITERATIONS = 10
FACTS = (
    "schedule", "accumulation", "chunks", "num_stages", "num_microbatches", "tensor_parallel",
    "data_parallel", "context_parallel", "sequence_length", "seed", "device", "versions",
    "extra_in_flight", "defer_step",
)


class RecordError(ValueError):
    """A folder that does not hold the record of a finished run; the message says what is wrong."""


def read_records(directory: Path) -> list[dict[str, Any]]:
    """Return the records of all ranks of a run, in rank order.

    Raises:
        RecordError: There are none, some rank's is missing, or one is not readable.
    """
    paths = rank_files(directory, "json")
    if not paths:
        raise RecordError(f"{directory} holds no rank*.json; was the run given --paci-record?")
    try:
        records = [json.loads(path.read_text()) for path in paths.values()]
    except (OSError, ValueError) as error:
        raise RecordError(f"a record in {directory} cannot be read: {error}") from error
    if not all(isinstance(record, dict) and "run" in record for record in records):
        raise RecordError(f"{directory} holds records of another version of megatron_paci, or "
                          "something else; run again")
    facts = records[0]["run"]
    ranks = facts["num_stages"] * facts["tensor_parallel"] * facts["data_parallel"]
    if missing := sorted(set(range(ranks * facts["context_parallel"])) - set(paths)):
        raise RecordError(f"{directory} lacks the record of rank {missing[0]}")
    return records


def by_stage(records: Sequence[Record]) -> list[list[Record]]:
    """Return the records of each stage: one per replica and tensor-parallel rank."""
    stages: list[list[Record]] = [[] for _ in range(records[0]["run"]["num_stages"])]
    for record in records:
        stages[record["run"]["stage"]].append(record)
    return stages


def tokens_per_second(records: Sequence[Record]) -> float | None:
    """Return the throughput of the iterations in which no activations were counted.

    From the end of the last counted iteration to the end of the last one, on the slowest rank;
    evaluations and checkpoints in between are part of it. PACI begins that span with a filled
    pipeline and ends it drained, so it is not flattered by the microbatches in flight.

    Returns:
        Tokens per second, None if there is no such iteration.
    """
    counted = records[0]["counted_iterations"]
    samples = sum(records[0]["samples"][counted:])
    if not samples or counted < 1:
        return None
    slowest = max(
        record["seconds_at_end"][-1] - record["seconds_at_end"][counted - 1] for record in records
    )
    return samples * records[0]["run"]["sequence_length"] / slowest if slowest > 0 else None


def final_evaluation(record: Record, data_set: str) -> float | None:
    """Return the loss of the last evaluation on a data set, None if there was none."""
    losses = [
        entry["losses"].get(LOSS) for entry in record["evaluations"]
        if entry["data_set"] == data_set
    ]
    return next((loss for loss in reversed(losses) if loss is not None), None)


def run_figures(records: Sequence[Record]) -> dict[str, Any]:
    """Return the figures of one run as plain values, lists per iteration or per stage.

    Keys: those of the run (``FACTS``); ``loss``, ``seconds`` (since training began) and ``samples``
    (seen so far) at the end of each iteration; ``final_loss``, ``valid_loss``, ``test_loss``,
    ``tokens_per_s``, ``counted_iterations``; ``bytes``, one dictionary per stage, of the rank that
    has most; under PACI also ``drift_max``, ``drift_bound``, ``drift_counts`` and ``in_flight_max``
    (one entry per stage).

    Raises:
        RecordError: An iteration has no loss.
    """
    stages = by_stage(records)
    last = stages[-1][0]
    losses = [entry.get(LOSS) for entry in last["losses"]]
    if not losses or None in losses:
        raise RecordError(f"the record of the last stage has no {LOSS!r} for some iteration")
    seen, total = [], 0
    for samples in last["samples"]:
        total += samples
        seen.append(total)
    end = losses[-FINAL_ITERATIONS:]
    figures = {
        **{name: last["run"][name] for name in FACTS},
        "loss": losses,
        "seconds": last["seconds_at_end"],
        "samples": seen,
        "counted_iterations": last["counted_iterations"],
        "final_loss": sum(end) / len(end),
        "valid_loss": final_evaluation(last, "validation"),
        "test_loss": final_evaluation(last, "test"),
        "tokens_per_s": tokens_per_second(records),
        "bytes": [
            {key: max(rank["bytes"][key] for rank in stage) for key in stage[0]["bytes"]}
            for stage in stages
        ],
    }
    if all(record["paci"] for record in records):
        for key in ("drift_max", "drift_bound", "drift_counts", "in_flight_max"):
            figures[key] = [stage[0]["paci"][key] for stage in stages]
    return figures


def to_json(report: Mapping[str, Any]) -> str:
    """Return a report as JSON text with every list of numbers on one line.

    Numbers that JSON does not know (NaN, infinity) become null.
    """
    text = json.dumps(_finite(report), indent=1, allow_nan=False)
    return re.sub(r"\[[^][{}\"]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value
