"""How the command line shows things to people: numbers, sizes, times and tables that look alike in every command; and
JSON to programs, on one line.

Knows nothing of queues. Whether there is a terminal is rich's to find out; without one the same words come as plain
lines, and no table is ever cut to a guessed width.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from rich.box import ROUNDED
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 160  # of output that goes to a file or a pipe
#: Control characters that JSON leaves as they are, and that some terminals obey.
_CONTROLS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


def make_console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=not stream.isatty())


def json_line(value: Any) -> str:
    """A struct or plain values; spelled in ASCII where the output is not UTF-8, so that it is JSON all the same."""
    line = msgspec.json.encode(value).decode().translate(_CONTROLS)
    if codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8":
        return line
    return _NOT_ASCII.sub(_escaped, line)


def _escaped(found: re.Match[str]) -> str:
    pairs = found[0].encode("utf-16-be").hex()
    return "".join(f"\\u{pairs[i : i + 4]}" for i in range(0, len(pairs), 4))


def count(number: int) -> str:
    """
    >>> count(200000)
    '200 000'
    """
    return f"{number:,}".replace(",", " ")


def size(nbytes: int) -> str:
    """
    >>> size(512), size(3 << 20)
    ('512 B', '3.0 MiB')
    """
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def seconds(value: float) -> str:
    """
    >>> seconds(0.0123), seconds(2.5)
    ('12 ms', '2.5 s')
    """
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def rate(number: int, in_seconds: float) -> str:
    return f"{count(round(number / max(in_seconds, 1e-9)))}/s"


def moment(ms: int) -> str:
    """
    >>> moment(0)
    '1970-01-01T00:00:00.000Z'
    """
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{ms % 1000:03d}Z"


def some(items: Iterable[object], shown: int = 5) -> str:
    """The first few of many, and how many more there are.

    >>> some(range(7), 3)
    '0, 1, 2 and 4 more'
    """
    listed = [str(item) for item in items]
    rest = len(listed) - shown
    return ", ".join(listed[:shown]) + (f" and {count(rest)} more" if rest > 0 else "")


def facts_table(title: str, rows: Sequence[tuple[str | Text, str | Text]]) -> Table:
    """Two columns: what, and how much. A str is markup; what somebody else wrote comes as a Text."""
    table = Table(title=title, title_justify="left", box=ROUNDED, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text.from_markup(value) if isinstance(value, str) else value)
    return table


def columns_table(title: str, names: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> Table:
    table = Table(title=title, title_justify="left", box=ROUNDED)
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


class RateColumn(ProgressColumn):
    """Items a second so far."""

    def render(self, task: object) -> Text:
        speed = getattr(task, "finished_speed", None) or getattr(task, "speed", None)
        return Text(f"{count(round(speed))}/s" if speed else "", style="green")


def progress_bar(console: Console, unit: Literal["items", "bytes"] = "items") -> Progress:
    """A bar that counts; nothing at all where there is no terminal."""
    counted: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), RateColumn())
    if unit == "bytes":
        counted = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    return Progress(
        TextColumn("  {task.description}"), BarColumn(40), *counted, TimeElapsedColumn(),
        console=console, disable=not console.is_terminal, transient=True,
    )  # fmt: skip
