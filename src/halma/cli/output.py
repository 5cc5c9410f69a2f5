"""What commands print: tables (rich on a terminal, plain when piped), progress, JSON with a schema version.

rich is imported when it is used: a piped or JSON answer does without.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from halma.hal.errors import RequestError

Advance = Callable[[int, int, str], None]
"""(done so far, all there is, what it is at): moves a progress bar."""

_SCHEMA = re.compile(r"halma\.[a-z]+/[1-9][0-9]*")
_GAP = "  "


def at_least_one(option: str, value: int) -> None:
    """Refuse an option's number below 1.

    Raises:
        RequestError: naming the option.
    """
    if value < 1:
        raise RequestError(
            f"{option} takes a number from 1 on", asked=f"{option} {value}", found=f"{value} is below 1", do="1 or more"
        )


def note_simulated(backend: str) -> None:
    """Mark plain text, beside it, as that of a stand-in (B10); JSON says it in a field."""
    print(f"halma: note: {backend} is simulated: no such device was used", file=sys.stderr)


def shown(message: str, width: int | None) -> str:
    """A refusal folded under its labels; None is no terminal, where every line stays one line."""
    if width is None:
        return message
    indent = " " * len("  found: ")
    folded = (
        textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
        for line in message.splitlines()
    )
    return "\n".join(line for lines in folded for line in lines)


def print_refusal(message: str) -> None:
    """Print it on standard error, folded to a terminal."""
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
    print(shown(message, width), file=sys.stderr, flush=True)


def emit_json(document: Mapping[str, Any]) -> None:
    """Print a document as one JSON object. Numbers that JSON has no word for become the strings nan, inf, -inf.

    Raises:
        ValueError: it has no ``schema`` of the form ``halma.NAME/VERSION``; readers rely on it.
    """
    if not _SCHEMA.fullmatch(str(document.get("schema", ""))):
        raise ValueError(f"a JSON answer needs a schema like halma.backends/1, found {document.get('schema')!r}")
    print(json.dumps(_plain(document), indent=2, allow_nan=False, ensure_ascii=False))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str | None = None) -> None:
    """Print rows under headers; headers that are all empty are left out."""
    cells = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(headers, cells, title)
    else:
        print("\n".join(plain_table(headers, cells, title=title)))


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> list[str]:
    """The lines of a table without colour or frame; a row is always one line."""
    shown = [[" ".join(cell.splitlines()) for cell in row] for row in ([headers] if any(headers) else []) + list(rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(headers))] if shown else []
    lines = [] if title is None else [title]
    for row in shown:
        lines.append(_GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return lines


@contextmanager
def progress_bar(label: str, total: int | None = None, *, disable: bool = False) -> Iterator[Advance]:
    """A bar on standard error, when that is a terminal; it is gone when the block ends."""
    if disable or not sys.stderr.isatty():
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[at]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, at="")
        yield lambda done, all_, at: bar.update(task, completed=done, total=all_, at=at)


def _ignore(done: int, all_: int, at: str) -> None:
    """Progress that nobody watches."""


def _rich_table(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Text, not str: rich would read [M, D] as markup.
    table = Table(box=SIMPLE_HEAD, show_header=any(headers))
    for header in headers:
        table.add_column(Text(header), overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    if title is not None:
        console.print(Text(title))  # a table's own title would be folded to the table's width
    console.print(table)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
