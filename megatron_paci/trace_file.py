"""The file in which a rank leaves its trace: JSON lines, one span each (instrument.py lists them).

The first line says who wrote it. A run that is killed leaves a file that ends in the middle of a
line; all lines before count. Pure: no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_paci.rank_files import rank_files
from megatron_paci.timeline import Span

FORMAT = "megatron_paci trace 1"
DECIMALS = 7  # of seconds


class TraceError(ValueError):
    """A folder or file that holds no trace; the message says what is wrong and what to do."""


@dataclass(frozen=True)
class RankTrace:
    """What one rank has written."""

    header: dict[str, Any]
    """``rank``, ``stage``, ``num_stages``, ``replica``, ``schedule``, ``accumulation``,
    ``started``: the wall-clock time (s since 1970) that the spans count from."""
    spans: list[Span]
    truncated: bool
    """Whether the file ended within a line."""

    @property
    def stage(self) -> int:
        """Pipeline stage of the rank."""
        return self.header["stage"]


class TraceWriter:
    """Writes ``DIR/rank<r>.jsonl``, in place of that of an earlier run."""

    def __init__(self, directory: Path | str, header: dict[str, Any]):
        """Open the file.

        Raises:
            OSError: The folder cannot be written to.
        """
        Path(directory).mkdir(parents=True, exist_ok=True)
        path = Path(directory) / f"rank{header['rank']}.jsonl"
        self._file = path.open("w", encoding="ascii")
        self._write({"format": FORMAT, **header})
        self._file.flush()

    def write(self, spans: Iterable[Span]) -> None:
        """Append spans; they are in the file when this returns."""
        for span in spans:
            self._write({
                "kind": span.kind, "begin": round(span.begin, DECIMALS),
                "end": round(span.end, DECIMALS), **span.facts,
            })
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_trace(path: Path) -> RankTrace:
    """Read the trace of a rank, as far as it goes.

    Raises:
        TraceError: It is no trace, or a line in its middle is damaged.
    """
    lines = path.read_text(encoding="ascii", errors="replace").split("\n")
    header = _parse(lines[0])
    if header is None or header.pop("format", None) != FORMAT:
        raise TraceError(f"{path} is no trace: its first line does not say {FORMAT!r}")
    spans: list[Span] = []
    for number, line in enumerate(lines[1:], start=2):
        fields = _parse(line)
        if fields is not None and {"kind", "begin", "end"} <= fields.keys():
            spans.append(Span(fields.pop("kind"), fields.pop("begin"), fields.pop("end"), fields))
        elif number < len(lines):
            raise TraceError(f"{path}, line {number} is damaged: {line[:60]!r}")
    # After a whole last line comes an empty piece.
    return RankTrace(header, spans, truncated=lines[-1] != "")


def read_traces(directory: Path) -> list[RankTrace]:
    """Return the traces in a folder, in rank order.

    Raises:
        TraceError: There are none, a rank's is missing, or one cannot be read.
    """
    paths = rank_files(directory, "jsonl")
    if not paths:
        raise TraceError(
            f"{directory} holds no rank*.jsonl; give the folder of a run with --paci-trace"
        )
    traces = [read_trace(path) for path in paths.values()]
    stages = {trace.stage for trace in traces}
    if missing := set(range(traces[0].header["num_stages"])) - stages:
        raise TraceError(
            f"{directory} has no trace of stage {min(missing)}; copy the files of all nodes there"
        )
    return traces


def _parse(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
