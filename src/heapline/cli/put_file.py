"""`heapline put --file`: enqueue a file of JSON lines, batch by batch and in its order.

A refused line is reported with its number, and the other lines are enqueued. Too many refused lines end the command,
because then it is probably the wrong file. With an idempotency key each line is identified by its number, so an
interrupted import can be restarted from the top.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import typer
from msgspec import Meta
from rich.text import Text

from heapline.cli.options import Panel
from heapline.cli.output import Output, bold, count, counted, harmless, interruptible, make_console, progress_bar
from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest
from heapline.contract.message import Enqueued, Outgoing
from heapline.contract.payload_codec import without_values
from heapline.wire.json_forms import message_form

FILE = Panel("From a file")
BATCH = 500  # lines
BATCH_BYTES = 4 << 20
REFUSED_MAX = 100  # refused lines after which the rest of the file is not read
REFUSED_SHOWN = 10
_FORM = message_form()
_MESSAGE = msgspec.json.Decoder(_FORM.twin)
_ANY = msgspec.json.Decoder()
Batch = list[tuple[int, bytes]]  # line numbers, from 1, and lines


@dataclass(frozen=True, slots=True)
class Lines:
    """A file of messages, as options of the command."""

    file: Annotated[
        Path | None,
        "-f",
        "Enqueue a file of JSON lines, or stdin with -. Each line is a payload, stored as it is written. The "
        "options above apply to every line.",
        FILE,
    ] = None
    messages: Annotated[
        bool,
        'Read each line as a complete message: {"payload_json": …, "priority": 5, "delay": 10, …}. Use '
        "payload_text or payload (base64) if the payload is not JSON.",
        FILE,
    ] = False
    batch: Annotated[int, "Lines per call.", FILE, Meta(ge=1, le=10_000)] = BATCH


@dataclass(slots=True)
class Tally:
    """Counts of an import."""

    lines: int = 0  # lines read, without empty ones
    enqueued: int = 0
    duplicates: int = 0
    refused: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)  # the first few

    def refuse(self, line: int, error: Exception) -> None:
        self.refused += 1
        if len(self.errors) < REFUSED_SHOWN:
            self.errors.append({"line": line, "error": type(error).__name__, "text": str(error)})

    def add(self, numbers: list[int], results: list[Enqueued]) -> None:
        for line, result in zip(numbers, results, strict=True):
            if result.error is not None:
                self.refuse(line, result.error)
            elif result.duplicate:
                self.duplicates += 1
            else:
                self.enqueued += 1

    def __str__(self) -> str:
        text = f"{counted(self.enqueued, 'message')} enqueued"
        if self.duplicates:
            text += f", {count(self.duplicates)} already enqueued before"
        if self.refused:
            text += f", {count(self.refused)} refused"
        return text


@dataclass(slots=True)
class LineReader:
    """Turns a line into a message."""

    settings: dict[str, Any]  # fields of Outgoing, from the command line
    complete: bool  # whether each line is a complete message instead of a payload

    def __post_init__(self) -> None:
        given = [name for name, value in self.settings.items() if value and name != "idempotency_key"]
        if self.complete and given:
            raise BadRequest(f"with --messages each line has its own settings; omit {', '.join(given)}")

    def read(self, number: int, line: bytes) -> Outgoing:
        prefix = self.settings["idempotency_key"]
        own = None if prefix is None else f"{prefix}:{number}"
        try:
            if self.complete:
                message: Outgoing = _FORM.read(_MESSAGE.decode(line))
                return msgspec.structs.replace(message, idempotency_key=message.idempotency_key or own)
            _ANY.decode(line)
        except msgspec.ValidationError as error:
            raise BadRequest(f"not a message: {without_values(error)}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"not JSON: {without_values(error)}") from None
        return Outgoing(line, **self.settings | {"idempotency_key": own})

    def read_batch(self, batch: Batch, tally: Tally) -> tuple[list[int], list[Outgoing]]:
        """Return the messages of a batch with their line numbers; count the lines that are refused."""
        numbers, messages = [], []
        for number, line in batch:
            tally.lines += 1
            try:
                messages.append(self.read(number, line))
                numbers.append(number)
            except BadRequest as error:
                tally.refuse(number, error)
        return numbers, messages


async def put_file(hl: Broker, out: Output, topic: str, lines: Lines, settings: dict[str, Any]) -> None:
    """Enqueue all lines of a file, and print how many were enqueued and refused."""
    assert lines.file is not None
    reader, tally = LineReader(settings, lines.messages), Tally()
    with _open(lines.file) as file:
        try:
            await _send(hl, topic, file, reader, tally, lines.batch)
        except BaseException:  # Ctrl-C too
            if tally.enqueued or tally.duplicates:
                text = f"[yellow]interrupted: at least {tally}.[/yellow] {_restart_advice(settings)}"
                make_console(stderr=True).print(text)
            raise
    _report(topic, tally, out)


async def _send(hl: Broker, topic: str, file: IO[bytes], reader: LineReader, tally: Tally, batch_lines: int) -> None:
    with progress_bar(make_console(stderr=True), unit="bytes") as bar:
        task = bar.add_task("", total=_bytes_left(file))
        batches = _batches(file, batch_lines)
        while tally.refused < REFUSED_MAX and (batch := _next_batch(batches)):
            numbers, messages = reader.read_batch(batch, tally)
            if messages:
                tally.add(numbers, await hl.enqueue_batch(topic, messages, atomic=False))
            description = f"{count(tally.enqueued + tally.duplicates)} messages"
            bar.update(task, advance=sum(len(line) + 1 for _, line in batch), description=description)


def _batches(file: IO[bytes], batch_lines: int) -> Iterator[Batch]:
    batch: Batch = []
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


def _next_batch(batches: Iterator[Batch]) -> Batch:
    with interruptible():
        return next(batches, [])


def _open(path: Path) -> IO[bytes]:
    if str(path) == "-":
        return sys.stdin.buffer
    try:
        return path.open("rb")
    except OSError as error:
        raise BadRequest(f"cannot read the file {str(path)!r}: {error.strerror}") from None


def _bytes_left(file: IO[bytes]) -> int | None:
    """Return the remaining bytes of a file, or None for a pipe."""
    if not file.seekable():
        return None
    here = file.tell()  # a shell may have read the first lines of stdin
    left = file.seek(0, os.SEEK_END) - here
    file.seek(here)
    return left


def _report(topic: str, tally: Tally, out: Output) -> None:
    for error in tally.errors:
        out.note(Text.assemble(f"line {error['line']}: ", harmless(error["text"])), "red")
    if tally.refused > len(tally.errors):
        out.note(f"… and {count(tally.refused - len(tally.errors))} more lines were refused", "red")
    out.row(asdict(tally), f"{bold(topic)}: {tally}")
    if tally.refused >= REFUSED_MAX:
        text = f"[red]stopped: {count(tally.refused)} lines were refused; is this the right file?[/red]"
        make_console(stderr=True).print(text)
    if tally.refused:
        raise typer.Exit(1)


def _restart_advice(settings: dict[str, Any]) -> str:
    if settings["idempotency_key"] is not None:
        return "Run it again with the same --idempotency-key: messages that are already enqueued are recognized."
    return "With --idempotency-key NAME you could run it again without duplicates."
