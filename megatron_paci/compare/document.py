"""A document of headings, paragraphs, lists, tables, pictures and commands, as Markdown and HTML.

The HTML is one file that needs no network: pictures are inside.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto;
  max-width: 1240px; padding: 16px 20px 60px; }
h1 { font-size: 28px; margin: 8px 0 4px; }
h2 { font-size: 21px; margin: 36px 0 8px; border-bottom: 1px solid #ccc; padding-bottom: 4px; }
h3 { font-size: 17px; margin: 20px 0 4px; }
.lead { font-size: 20px; font-weight: 600; border-left: 6px solid #D55E00; padding: 6px 14px;
  background: #f6f6f6; }
table { border-collapse: collapse; margin: 10px 0; }
td, th { padding: 4px 14px 4px 0; text-align: right; border-bottom: 1px solid #e3e3e3;
  font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; }
pre { background: #f6f6f6; padding: 10px 12px; white-space: pre-wrap; overflow-wrap: anywhere;
  font-size: 13px; }
img { max-width: 100%; height: auto; display: block; }
"""


@dataclass(frozen=True)
class Heading:
    """A heading; level 2 or 3."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; ``lead`` is the one that is read first."""

    text: str
    lead: bool = False


@dataclass(frozen=True)
class Items:
    """A list."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table; the first row is its head."""

    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG file beside the document, and what it shows, in words."""

    path: Path
    text: str


@dataclass(frozen=True)
class Verbatim:
    """A command, or what a program has printed."""

    text: str


Block = Heading | Paragraph | Items | Table | Picture | Verbatim


def to_markdown(title: str, blocks: Sequence[Block]) -> str:
    """Return the document as Markdown."""
    return "\n\n".join([f"# {title}", *map(_markdown, blocks)]) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Paragraph(text, lead):
            return f"**{text}**" if lead else text
        case Items(texts):
            return "\n".join(f"- {text}" for text in texts)
        case Table(rows):
            cells = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
            rule = " | ".join(["---"] + ["---:"] * (len(rows[0]) - 1))
            return "\n".join(f"| {line} |" for line in (cells[0], rule, *cells[1:]))
        case Picture(path, text):
            return f"![{text}]({path.name})"
        case Verbatim(text):
            return f"```\n{text}\n```"


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """Return the document as one HTML file.

    Raises:
        OSError: A picture cannot be read.
    """
    body = "\n".join(map(_html, blocks))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{html.escape(title)}</title>'
        f"\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n{body}\n"
        "</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Paragraph(text, lead):
            start = '<p class="lead">' if lead else "<p>"
            return f"{start}{html.escape(text)}</p>"
        case Items(texts):
            return "<ul>" + "".join(f"<li>{html.escape(text)}</li>" for text in texts) + "</ul>"
        case Table(rows):
            lines = [
                "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
                for tag, row in zip(["th"] + ["td"] * len(rows), rows)
            ]
            return "<table>\n" + "\n".join(lines) + "\n</table>"
        case Picture(path, text):
            data = base64.b64encode(path.read_bytes()).decode("ascii")
            return f'<img src="data:image/png;base64,{data}" alt="{html.escape(text)}">'
        case Verbatim(text):
            return f"<pre>{html.escape(text)}</pre>"
