"""From the records of training runs (``--paci-record``) to the figures one compares.

Pure: reads JSON and computes, without torch. A pipeline without replicas is assumed: rank ``i`` is
stage ``i``, and the last rank has the losses.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LABELS = {"1f1b": "1F1B", "interleaved": "Interleaved 1F1B", "paci": "PACI"}
LOSS = "lm loss"
ITERATION = re.compile(r"\biteration +(\d+)/ *\d+ \|.*\blm loss: (\S+)")
LAUNCHER = re.compile(r"^.*torch/distributed/elastic/multiprocessing/api\.py.*$", re.MULTILINE)
# A single iteration's loss says more about its samples than about the model.
FINAL_ITERATIONS = 10


class RecordError(ValueError):
    """A folder that does not hold the record of a finished run; the message says what is wrong."""


def read_records(directory: Path) -> list[dict[str, Any]]:
    """Return the records of all ranks of a run, in rank order.

    Raises:
        RecordError: There are none, some rank's is missing, or one is not readable.
    """
    paths = {}
    for path in Path(directory).glob("rank*.json"):
        if match := re.fullmatch(r"rank(\d+)", path.stem):
            paths[int(match[1])] = path
    if not paths:
        raise RecordError(f"{directory} holds no rank*.json; was the run given --paci-record?")
    if missing := sorted(set(range(max(paths) + 1)) - set(paths)):
        raise RecordError(f"{directory} lacks the record of rank {missing[0]}")
    try:
        return [json.loads(paths[rank].read_text()) for rank in sorted(paths)]
    except (OSError, ValueError) as error:
        raise RecordError(f"a record in {directory} cannot be read: {error}") from error


def tokens_per_second(
    records: Sequence[Mapping[str, Any]], *, tokens_per_iteration: int
) -> float | None:
    """Return the throughput of the iterations in which no activations were counted.

    From the end of the last counted iteration to the end of the last one, on the slowest rank. PACI
    begins that span with a filled pipeline and ends it drained, so it is not flattered by the
    microbatches in flight.

    Returns:
        Tokens per second, None if there is no such iteration.
    """
    counted = records[0]["counted_iterations"]
    iterations = len(records[0]["seconds_at_end"]) - counted
    if iterations < 1 or counted < 1:
        return None
    slowest = max(
        record["seconds_at_end"][-1] - record["seconds_at_end"][counted - 1] for record in records
    )
    return iterations * tokens_per_iteration / slowest if slowest > 0 else None


def validation_loss(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the loss of the last evaluation, None if there was none.

    Records do not name the data set: this is the validation loss unless the data flags also gave a
    test set, which Megatron evaluates last.
    """
    losses = [entry["losses"].get(LOSS) for entry in records[-1]["evaluations"]]
    return next((loss for loss in reversed(losses) if loss is not None), None)


def run_figures(
    records: Sequence[Mapping[str, Any]], *, samples_per_iteration: int, sequence_length: int
) -> dict[str, Any]:
    """Return the figures of one run as plain values, lists per iteration or per stage.

    Keys: ``loss`` and ``seconds`` (since training began, at the end of each iteration),
    ``samples_per_iteration``, ``final_loss``, ``valid_loss``, ``tokens_per_s``, ``bytes`` (one
    dictionary per stage); under PACI also ``drift_max``, ``drift_bound`` and ``in_flight_max``
    (one entry per stage).
    """
    losses = [entry.get(LOSS) for entry in records[-1]["losses"]]
    if not losses or None in losses:
        raise RecordError(f"the record of the last stage has no {LOSS!r} for some iteration")
    last = losses[-FINAL_ITERATIONS:]
    figures = {
        "loss": losses,
        "seconds": records[-1]["seconds_at_end"],
        "samples_per_iteration": samples_per_iteration,
        "final_loss": sum(last) / len(last),
        "valid_loss": validation_loss(records),
        "tokens_per_s": tokens_per_second(
            records, tokens_per_iteration=samples_per_iteration * sequence_length
        ),
        "bytes": [record["bytes"] for record in records],
    }
    if all(record["paci"] for record in records):
        for key in ("drift_max", "drift_bound", "in_flight_max"):
            figures[key] = [record["paci"][key] for record in records]
    return figures


def speedup(runs: Mapping[str, Mapping[str, Any]], *, stages: int, microbatches: int) -> dict:
    """Return PACI's throughput over 1F1B's: ``measured`` (None if unknown) and ``theory``.

    1F1B is busy for m of m + N - 1 slots of an iteration, PACI always.
    """
    rates = [runs.get(name, {}).get("tokens_per_s") for name in ("paci", "1f1b")]
    return {
        "measured": rates[0] / rates[1] if all(rates) else None,
        "theory": (microbatches + stages - 1) / microbatches,
    }


def speedup_text(report: Mapping[str, Any]) -> str:
    """Return what one has to know to read the throughputs: theory, and how they were measured."""
    if report["speedup"]["measured"] is None:
        return "PACI / 1F1B in tokens/s: not measured"
    text = (
        f"PACI / 1F1B in tokens/s: {report['speedup']['measured']:.2f} measured, "
        f"{report['speedup']['theory']:.2f} at most in theory,\n(m+N-1)/m for "
        f"N = {report['num_stages']} stages of equal cost and m = {report['num_microbatches']} "
        "microbatches. One run each: whatever\nelse the machine did meanwhile is in the times."
    )
    if report["speedup"]["measured"] > 1.03 * report["speedup"]["theory"]:
        text += "\nMore than theory allows: something else has slowed 1F1B's run. Measure again."
    if report["cores"] < report["num_stages"]:
        text += (
            f"\nThe {report['num_stages']} stages share {report['cores']} core: there is no idle "
            "time for PACI to fill."
        )
    return text


def comparison_table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of the runs' figures: one row per figure, one column per run."""
    num_stages = max(len(run["bytes"]) for run in runs.values())
    rows = [
        ("", *(LABELS.get(name, name) for name in runs)),
        (f"training loss (nats/token, mean of the last {FINAL_ITERATIONS} iterations)",
         *(_number(run["final_loss"], ".3f") for run in runs.values())),
        ("validation loss (nats/token)",
         *(_number(run["valid_loss"], ".3f") for run in runs.values())),
        ("throughput (tokens/s)",
         *(_number(run["tokens_per_s"], ",.0f") for run in runs.values())),
    ]
    for title, cell in (
        ("drift reached / bound (optimizer steps)", _drift),
        ("most microbatches in flight", lambda run, stage: str(run["in_flight_max"][stage])
         if "in_flight_max" in run else "-"),
        ("parameters (MB)", lambda run, stage: _megabytes(run, stage, "parameters")),
        ("activations kept for backward, peak (MB)",
         lambda run, stage: _megabytes(run, stage, "activations_peak")),
    ):
        rows += [
            (f"{title}, stage {stage}", *(cell(run, stage) for run in runs.values()))
            for stage in range(num_stages)
        ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(
            cell.rjust(max(width, 10)) for cell, width in zip(row[1:], widths[1:])
        )]).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def to_json(report: Mapping[str, Any]) -> str:
    """Return a report as JSON text with every list of numbers on one line.

    Numbers that JSON does not know (NaN, infinity) become null.
    """
    text = json.dumps(_finite(report), indent=1, allow_nan=False)
    return re.sub(r"\[[^][{}\"]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def progress(line: str) -> tuple[int, float] | None:
    """Return (iteration, loss) of a line of Megatron's log, None if it is another line."""
    match = ITERATION.search(line)
    return (int(match[1]), float(match[2])) if match else None


def failure(log: str, *, num_lines: int = 15) -> str:
    """Return those lines of a failed run's log that say why, as well as one can tell."""
    # What the launcher adds once a rank has failed says only that.
    log = LAUNCHER.split(log)[0]
    if "megatron_paci: error:" in log:
        return log[log.index("megatron_paci: error:"):].strip()
    lines = [line for line in log.splitlines() if line.strip() and "warn" not in line.lower()]
    return "\n".join(lines[-num_lines:]) or "(the log is empty)"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _drift(run: Mapping[str, Any], stage: int) -> str:
    if "drift_max" not in run:
        return "-"
    return f"{run['drift_max'][stage]} / {run['drift_bound'][stage]}"


def _megabytes(run: Mapping[str, Any], stage: int, key: str) -> str:
    return f"{run['bytes'][stage][key] / 1e6:.1f}" if stage < len(run["bytes"]) else "-"
