"""The command line: ``python -m megatron_paci trace DIR``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_paci.simulate.orders import Task, Work
from megatron_paci.simulate.picture import Panel, draw_panels
from megatron_paci.simulate.schedules import LABELS
from megatron_paci.simulate.timing import Event
from megatron_paci.terminal import USAGE_ERROR, say_error
from megatron_paci.trace import CAUSES, chrome_trace, on_one_clock, shares
from megatron_paci.trace_file import RankTrace, TraceError, read_traces

SHOWN_ITERATIONS = 4
DRAWN = {"F": Work.FORWARD, "B": Work.BACKWARD, "close": Work.STEP, "STEP": Work.STEP}


def add_trace_command(commands: Any) -> None:
    """Add ``trace`` to the subcommands of the package."""
    parser = commands.add_parser(
        "trace",
        help="show the traces of a run (--paci-trace): time line, idle time by cause, Perfetto",
        description="Put the traces of all ranks together. Writes trace.json (open it in "
        "https://ui.perfetto.dev), timeline.png, timeline.svg and summary.json, and prints where "
        "the time of every stage went. The trace of a killed run counts as far as it goes.",
    )
    parser.set_defaults(run=run_trace)
    parser.add_argument("directory", metavar="DIR", help="the folder given to --paci-trace")
    parser.add_argument("--output", metavar="DIR", help="folder for the results (default: DIR)")
    parser.add_argument(
        "--iterations", metavar="FIRST:LAST",
        help=f"iterations in the picture, from 1 (default: {SHOWN_ITERATIONS} in the middle)",
    )


def run_trace(options: argparse.Namespace, argv: list[str]) -> int:
    """Run the command line; return the exit status."""
    output = Path(options.output or options.directory)
    try:
        traces = on_one_clock(read_traces(Path(options.directory)))
        first, last = _iterations(options.iterations, traces)
        output.mkdir(parents=True, exist_ok=True)
        summary = summarize(traces)
        (output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        (output / "trace.json").write_text(json.dumps(chrome_trace(traces)))
        panel = panel_of(traces, first, last)
        draw_panels([panel], [output / "timeline.png", output / "timeline.svg"], unit="ms")
    except (TraceError, OSError) as error:
        say_error(str(error))
        return USAGE_ERROR
    sys.stdout.write(summary_text(summary))
    for name, what in (
        ("timeline.png", f"time line of iterations {first} to {last}"),
        ("timeline.svg", "the same"),
        ("trace.json", "for https://ui.perfetto.dev"),
        ("summary.json", "the table"),
    ):
        sys.stdout.write(f"{output / name}: {what}\n")
    return 0


def summarize(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return seconds by cause of every rank; ``busy`` is the share of passes and updates."""
    ranks = []
    for trace in sorted(traces, key=lambda each: (each.header["replica"], each.stage)):
        seconds = shares(trace)
        whole = sum(seconds.values())
        work = seconds["F"] + seconds["B"] + seconds["step"]
        ranks.append({
            "rank": trace.header["rank"],
            "stage": trace.stage,
            "seconds": {cause: round(value, 6) for cause, value in seconds.items()},
            "busy": round(work / whole, 4) if whole else None,
            "truncated": trace.truncated,
        })
    header = traces[0].header
    return {
        "schedule": header["schedule"],
        "num_stages": header["num_stages"],
        "iterations": max(len(iteration_ends(trace)) for trace in traces),
        "causes": CAUSES,
        "ranks": ranks,
    }


def summary_text(summary: dict[str, Any]) -> str:
    """Return the summary as a table: a row per rank, percent of its time per cause."""
    ranks = summary["ranks"]
    shown = [cause for cause in CAUSES if any(each["seconds"][cause] > 0 for each in ranks)]
    head = ["stage", "rank", "time (s)", *(CAUSES[cause].split(" (")[0] for cause in shown)]
    rows = []
    for each in ranks:
        whole = sum(each["seconds"].values())
        rows.append([
            str(each["stage"]), str(each["rank"]), f"{whole:.3f}",
            *(f"{each['seconds'][cause] / whole:.1%}" if whole else "-" for cause in shown),
        ])
    # One cause per line, stages side by side: causes have long names and stages are many.
    columns = list(zip(head, *rows))
    widths = [max(len(cell) for cell in row) for row in zip(*columns)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in columns
    ]
    title = (
        f"{summary['schedule']}, {summary['num_stages']} stages, {summary['iterations']} "
        "iterations; percent of each rank's time from its first to its last entry"
    )
    cut = [str(each["rank"]) for each in ranks if each["truncated"]]
    note = [f"The trace of rank {', '.join(cut)} ends within a line: the run was killed."]
    return "\n".join([title, "", *lines, "", *(note if cut else [])]) + "\n"


def panel_of(traces: Sequence[RankTrace], first: int, last: int, title: str = "") -> Panel:
    """Return the passes and updates of the first pipeline in some iterations, in ms."""
    replica = min(trace.header["replica"] for trace in traces)
    pipeline = [trace for trace in traces if trace.header["replica"] == replica]
    ends = dict(iteration_ends(max(pipeline, key=lambda trace: trace.stage)))
    begin, end = ends.get(first - 1, 0.0), ends.get(last, float("inf"))
    events = []
    for trace in pipeline:
        for span in trace.spans:
            if span.kind in DRAWN and span.end > begin and span.begin < end:
                index = span.facts.get("microbatch", 0)
                task = Task(DRAWN[span.kind], index, span.facts.get("chunk", 0))
                times = (1000 * (max(begin, span.begin) - begin),
                         1000 * (min(end, span.end) - begin))
                events.append(Event(trace.stage, task, *times))
    if not events:
        raise TraceError(f"no pass lies within iterations {first} to {last}")
    forwards = sum(span.kind == "F" and not span.facts.get("chunk") for span in pipeline[-1].spans)
    schedule = pipeline[0].header["schedule"]
    return Panel(
        title or f"{LABELS.get(schedule, schedule)}, iterations {first} to {last}",
        events,
        pipeline[0].header["num_stages"],
        max(1, forwards // max(1, len(ends))),
    )


def iteration_ends(trace: RankTrace) -> list[tuple[int, float]]:
    """Return the iterations of a trace with the times of their ends."""
    return [
        (span.facts["number"], span.end) for span in trace.spans if span.kind == "iteration"
    ]


def _iterations(text: str | None, traces: Sequence[RankTrace]) -> tuple[int, int]:
    """Return the first and the last iteration to show.

    Raises:
        TraceError: ``text`` does not name iterations that the trace has.
    """
    count = min(len(iteration_ends(trace)) for trace in traces)
    if text is None:
        first = max(1, (count - SHOWN_ITERATIONS) // 2 + 1)
        return first, max(first, min(count, first + SHOWN_ITERATIONS - 1))
    begin, _, end = text.partition(":")
    if not (begin.isdecimal() and end.isdecimal() and 1 <= int(begin) <= int(end) <= count):
        raise TraceError(
            f"--iterations {text}: give FIRST:LAST within the trace's 1:{count}, e.g. 1:{count}"
        )
    return int(begin), int(end)
