"""Output of commands: JSON lines for programs, tables and text for people, errors, questions before destruction.

Knows nothing of queues. rich finds out whether stdout is a terminal. If it is not, the same words are printed as plain
lines, and no table is cut to a guessed width.
"""

from __future__ import annotations

import codecs
import errno
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import typer
from rich.box import ROUNDED
from rich.console import Console, RenderableType
from rich.markup import escape
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

from heapline.cli.main import TRACEBACK
from heapline.cli.options import JsonOption
from heapline.contract.errors import HeaplineError

T = TypeVar("T")
PLAIN_WIDTH = 160  # columns of output to a file or a pipe
#: Control characters that JSON does not escape and that some terminals obey.
_CONTROLS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


# -- results -----------------------------------------------------------------------------------------------------------


class Output:
    """Prints the result of a command, either as JSON lines or for people."""

    def __init__(self, as_json: JsonOption = False) -> None:
        self.as_json = as_json

    @cached_property
    def console(self) -> Console:
        return make_console()

    def row(self, value: Any, *shown: RenderableType) -> None:
        """Print one result: `value` as a JSON line, or `shown` for people. A str in `shown` is markup."""
        if self.as_json:
            print_json(value)
            return
        for item in shown:
            self.console.print(item)

    def rows(
        self,
        found: Iterable[T],
        table: Callable[[list[T]], RenderableType],
        *,
        empty: str,
        json: Callable[[T], Any] = lambda item: item,
        limit: int | None = None,
    ) -> None:
        """Print one JSON line per result, or a table of all results, or `empty` if there are none.

        A table of `limit` results ends with the advice to ask for more.
        """
        items = list(found)
        if self.as_json:
            for item in items:
                print_json(json(item))
            return
        self.console.print(table(items) if items else empty)
        if limit == len(items):
            self.hint(f"there may be more; use --limit {limit * 10}")

    def table(
        self,
        found: Iterable[T],
        names: Sequence[str],
        cells: Callable[[T], Sequence[str | Text]],
        *,
        title: str = "",
        right: Sequence[int] = (),
        **more: Any,
    ) -> None:
        """Print a table with one row of `cells` per result; the rest is as in `rows`."""
        self.rows(found, lambda items: columns_table(title, names, map(cells, items), right), **more)

    def hint(self, text: str) -> None:
        """Print advice for people to stdout, dimmed."""
        if not self.as_json:
            self.console.print(f"[dim]{text}[/dim]")

    def note(self, text: str | Text, style: str = "") -> None:
        """Print a remark for people to stderr. `text` is markup if it is a str."""
        if not self.as_json:
            make_console(stderr=True).print(text, style=style)


def print_json(value: Any) -> None:
    """Print a struct or plain values on one line."""
    sys.stdout.write(json_line(value) + "\n")


def json_line(value: Any) -> str:
    """Encode as JSON. Where stdout is not UTF-8, everything else than ASCII is escaped."""
    line = msgspec.json.encode(value).decode().translate(_CONTROLS)
    if codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8":
        return line
    return _NOT_ASCII.sub(_escape_utf16, line)


def _escape_utf16(match: re.Match[str]) -> str:
    pairs = match[0].encode("utf-16-be").hex()
    return "".join(f"\\u{pairs[i : i + 4]}" for i in range(0, len(pairs), 4))


def make_console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=not stream.isatty())


def facts_table(title: str, rows: Iterable[tuple[str | Text, str | Text | None]]) -> Table:
    """Return a table of names and values, without empty ones. A str is markup; text that others wrote is a Text."""
    table = Table(title=title, title_justify="left", box=ROUNDED, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if value:
            table.add_row(name, Text.from_markup(value) if isinstance(value, str) else value)
    return table


def columns_table(
    title: str, names: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Sequence[int] = ()
) -> Table:
    """Return a table with named columns; those numbered in `right` are aligned to the right. A str is markup."""
    table = Table(title=title, title_justify="left", box=ROUNDED)
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def progress_bar(console: Console, unit: Literal["items", "bytes"] = "items") -> Progress:
    """Return a progress bar that counts items or bytes. It shows nothing if the console is not a terminal."""
    counted: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), RateColumn())
    if unit == "bytes":
        counted = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    columns = (TextColumn("  {task.description}"), BarColumn(40), *counted, TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


class RateColumn(ProgressColumn):
    """Items per second so far."""

    def render(self, task: object) -> Text:
        speed = getattr(task, "finished_speed", None) or getattr(task, "speed", None)
        return Text(f"{count(round(speed))}/s" if speed else "", style="green")


# -- values ------------------------------------------------------------------------------------------------------------


def harmless(text: str, *, lines: bool = False) -> Text:
    r"""Return text that only shows itself: unprintable characters are escaped, and nothing in it is markup.

    >>> harmless("[red]\x1b[31m").plain
    '[red]\\x1b[31m'
    """
    kept = ("\n", "\t") if lines else ()
    return Text("".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text))


def bold(name: str) -> str:
    """Return a name that others chose as bold markup that cannot move the cursor."""
    return f"[bold]{escape(harmless(name).plain)}[/bold]"


def count(number: int) -> str:
    """
    >>> count(200000)
    '200 000'
    """
    return f"{number:,}".replace(",", " ")


def alarm(number: int) -> str:
    """Return a count as markup, red unless it is zero."""
    return f"[red]{count(number)}[/red]" if number else "0"


def depths(states: Mapping[str, int]) -> str:
    """
    >>> depths({"ready": 1000, "dead": 2})
    '1 000 ready, 2 dead'
    """
    return ", ".join(f"{count(number)} {state}" for state, number in states.items())


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "row"), counted(2000, "dead letter")
    ('1 row', '2 000 dead letters')
    """
    return f"1 {noun}" if number == 1 else f"{count(number)} {noun}s"


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
    return millis(value * 1000)


def millis(ms: float | None) -> str:
    """
    >>> [millis(ms) for ms in (0.25, 12.0, 1500, None)]
    ['0.2 ms', '12 ms', '1.5 s', '–']
    """
    if ms is None:
        return "–"
    if ms >= 1000:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"


def rate(number: int, in_seconds: float) -> str:
    return f"{count(round(number / max(in_seconds, 1e-9)))}/s"


def timestamp(ms: int) -> str:
    """
    >>> timestamp(0)
    '1970-01-01T00:00:00.000Z'
    """
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{ms % 1000:03d}Z"


def some(items: Iterable[object], shown: int = 5) -> str:
    """Return the first few items, and how many more there are.

    >>> some(range(7), 3)
    '0, 1, 2 and 4 more'
    """
    listed = [str(item) for item in items]
    rest = len(listed) - shown
    return ", ".join(listed[:shown]) + (f" and {count(rest)} more" if rest > 0 else "")


# -- errors ------------------------------------------------------------------------------------------------------------

#: Advice by errno, after the path and the system's own text.
_OS_ADVICE = {
    errno.EACCES: "run the command as a user that may access it, or choose another path",
    errno.EPERM: "run the command as a user that may access it, or choose another path",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file; choose a directory",
    errno.EEXIST: "a file is in the way; choose another path",
    errno.EISDIR: "choose a file",
    errno.EROFS: "choose a path on a writable disk",
    errno.EADDRINUSE: "another process uses this address; stop it, or choose another port",
    errno.EADDRNOTAVAIL: "this machine does not have the address; choose another --host",
}
_OUTPUT_INCOMPLETE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def one_line(error: HeaplineError | OSError) -> str:
    """Return the line that is shown instead of a traceback."""
    if isinstance(error, HeaplineError):
        return f"{type(error).__name__}: {error}"
    text = error.strerror or str(error)
    if error.errno in _OUTPUT_INCOMPLETE:
        return f"the output is incomplete, because it could not be written: {text}"
    path = f"{str(error.filename)!r}: " if error.filename is not None else ""
    advice = _OS_ADVICE.get(error.errno or 0)
    return f"{path}{text}; {advice or f'set {TRACEBACK}=1 to see where this happened'}"


def not_a_directory(path: Path) -> str:
    """Return why a path cannot be used as an existing directory."""
    return f"{str(path)!r} is a file" if path.exists() else f"directory {str(path)!r} does not exist"


# -- questions ---------------------------------------------------------------------------------------------------------


def confirm(question: str, yes: bool) -> None:
    """Ask on stderr, unless `yes` is true. End the command with exit code 1 if the answer is not yes."""
    if yes:
        return
    answer = _read_answer(question)
    if answer is None:
        typer.echo(err=True)
        typer.echo("no answer; nothing was changed (use --yes to skip the question)", err=True)
        raise typer.Exit(1)
    if answer not in ("y", "yes"):
        typer.echo("nothing was changed", err=True)
        raise typer.Exit(1)


def _read_answer(question: str) -> str | None:
    """Return the answer, or None if stdin has ended. `typer.confirm` would print a blank to stdout."""
    typer.echo(f"{question} [y/N]: ", nl=False, err=True)
    try:
        with interruptible():
            line = sys.stdin.readline()
    except (KeyboardInterrupt, UnicodeDecodeError):
        return None
    return line.strip().lower() if line else None


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end a blocking read inside an event loop. The loop's own handler would wait for the read to end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
