"""`heapline put --file`: a file of JSON lines into a topic, batch by batch and in its order.

A line that is refused is told with its number, and the others go in; too many of them end it, because then it is the
wrong file. With an idempotency key each line is known by its number: whatever broke off is started again from the top,
and what is in already is recognised.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.text import Text

from heapline.broker import Broker
from heapline.cli.asking import interruptible
from heapline.cli.messages import harmless, print_json
from heapline.cli.present import count, make_console, progress_bar
from heapline.contents import without_values
from heapline.errors import BadRequest
from heapline.model import Enqueued, Outgoing
from heapline.wire.json_requests import NewMessage

BATCH = 500
BATCH_BYTES = 4 << 20
REFUSED_MAX = 100  # lines; then the rest is left alone
REFUSED_SHOWN = 10
_MESSAGE = msgspec.json.Decoder(NewMessage)
_ANY = msgspec.json.Decoder()


@dataclass(slots=True)
class Tally:
    lines: int = 0  # read, empty ones apart
    enqueued: int = 0
    duplicates: int = 0
    refused: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)  # the first of them

    def refuse(self, line: int, error: Exception) -> None:
        self.refused += 1
        if len(self.errors) < REFUSED_SHOWN:
            self.errors.append({"line": line, "error": type(error).__name__, "text": str(error)})

    def count_in(self, numbers: list[int], results: list[Enqueued]) -> None:
        for line, result in zip(numbers, results, strict=True):
            if result.error is not None:
                self.refuse(line, result.error)
            elif result.duplicate:
                self.duplicates += 1
            else:
                self.enqueued += 1


@dataclass(slots=True)
class Lines:
    """How a line becomes a message."""

    settings: dict[str, Any]  # of Outgoing, from the command line
    whole: bool

    def __post_init__(self) -> None:
        given = [name for name, value in self.settings.items() if value and name != "idempotency_key"]
        if self.whole and given:
            raise BadRequest(f"with --messages each line has its own settings: leave away {', '.join(given)}")

    def read(self, number: int, line: bytes) -> Outgoing:
        prefix = self.settings["idempotency_key"]
        own = None if prefix is None else f"{prefix}:{number}"
        try:
            if self.whole:
                message = _MESSAGE.decode(line).outgoing()
                return msgspec.structs.replace(message, idempotency_key=message.idempotency_key or own)
            _ANY.decode(line)
        except msgspec.ValidationError as error:
            raise BadRequest(f"not a message: {without_values(error)}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"not JSON: {without_values(error)}") from None
        return Outgoing(line, **self.settings | {"idempotency_key": own})


async def put_file(
    hl: Broker, topic: str, path: Path, settings: dict[str, Any], *, whole: bool, batch_lines: int, as_json: bool
) -> None:
    lines, tally = Lines(settings, whole), Tally()
    note = make_console(stderr=True)
    with _opened(path) as file:
        try:
            await _send(hl, topic, file, lines, tally, batch_lines, note)
        except BaseException:  # Ctrl-C too
            if tally.enqueued or tally.duplicates:
                note.print(f"[yellow]broke off: at least {_in_words(tally)}.[/yellow] {_again(settings)}")
            raise
    _tell(topic, tally, note, as_json, stopped=tally.refused >= REFUSED_MAX)


async def _send(
    hl: Broker, topic: str, file: IO[bytes], lines: Lines, tally: Tally, batch_lines: int, note: Console
) -> None:
    with progress_bar(note, unit="bytes") as bar:
        task = bar.add_task("", total=_size(file))
        batches = _batches(file, batch_lines)
        while batch := _next(batches):
            numbers, messages = _read(batch, lines, tally)
            if messages:
                tally.count_in(numbers, await hl.enqueue_batch(topic, messages, atomic=False))
            _advance(bar, task, tally, batch)
            if tally.refused >= REFUSED_MAX:
                return


def _batches(file: IO[bytes], batch_lines: int) -> Iterator[list[tuple[int, bytes]]]:
    """Lines with their numbers, from 1; empty ones are counted and left out."""
    batch: list[tuple[int, bytes]] = []
    nbytes = 0
    for number, line in enumerate(file, 1):
        if stripped := line.strip():
            batch.append((number, stripped))
            nbytes += len(line)
        if len(batch) >= batch_lines or nbytes >= BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _next(batches: Iterator[list[tuple[int, bytes]]]) -> list[tuple[int, bytes]]:
    with interruptible():
        return next(batches, [])


def _read(batch: list[tuple[int, bytes]], lines: Lines, tally: Tally) -> tuple[list[int], list[Outgoing]]:
    numbers, messages = [], []
    for number, line in batch:
        tally.lines += 1
        try:
            messages.append(lines.read(number, line))
            numbers.append(number)
        except BadRequest as error:
            tally.refuse(number, error)
    return numbers, messages


def _advance(bar: Progress, task: TaskID, tally: Tally, batch: list[tuple[int, bytes]]) -> None:
    nbytes = sum(len(line) + 1 for _, line in batch)
    bar.update(task, advance=nbytes, description=f"{count(tally.enqueued + tally.duplicates)} messages")


def _opened(path: Path) -> IO[bytes]:
    if str(path) == "-":
        return sys.stdin.buffer
    try:
        return path.open("rb")
    except OSError as error:
        raise BadRequest(f"the file {str(path)!r} cannot be read: {error.strerror}") from None


def _size(file: IO[bytes]) -> int | None:
    """Bytes that are left; None of a pipe, which does not say."""
    if not file.seekable():
        return None
    here = file.tell()  # a shell may have read the first lines of stdin
    left = file.seek(0, os.SEEK_END) - here
    file.seek(here)
    return left


# -- afterwards --------------------------------------------------------------------------------------------------------


def _tell(topic: str, tally: Tally, note: Console, as_json: bool, *, stopped: bool) -> None:
    if as_json:
        told = {name: getattr(tally, name) for name in ("lines", "enqueued", "duplicates", "refused", "errors")}
        print_json(told)
    else:
        for error in tally.errors:
            note.print(Text.assemble(f"line {error['line']}: ", harmless(error["text"]), style="red"))
        if tally.refused > len(tally.errors):
            note.print(f"[red]… and {count(tally.refused - len(tally.errors))} more lines were refused[/red]")
        make_console().print(f"[bold]{escape(topic)}[/bold]: {_in_words(tally)}")
    if stopped:
        note.print(f"[red]stopped: {count(tally.refused)} lines were refused; is this the right file?[/red]")
    if tally.refused:
        raise typer.Exit(1)


def _in_words(tally: Tally) -> str:
    told = "1 message" if tally.enqueued == 1 else f"{count(tally.enqueued)} messages"
    told += " put"
    if tally.duplicates:
        told += f", {count(tally.duplicates)} were there already"
    if tally.refused:
        told += f", {count(tally.refused)} refused"
    return told


def _again(settings: dict[str, Any]) -> str:
    if settings["idempotency_key"] is not None:
        return "Start it again with the same --idempotency-key: what is in already is recognised."
    return "With --idempotency-key NAME it could be started again without doubling anything."
