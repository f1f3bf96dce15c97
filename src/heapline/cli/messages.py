"""How the command line shows messages: JSON with the names of the HTTP face, and tables for people.

What stands in a message was written by somebody else: for people nothing of it reaches the terminal that could move
its cursor or change its colours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from heapline.cli.present import count, json_line, size
from heapline.cli.units import span
from heapline.model import Message, MessageInfo
from heapline.wire.json_shapes import PoppedTold, shown, tell_message

PREVIEW = 100  # characters of a payload in a table
HEX_BYTES = 16
REASON_WIDTH = 20

JsonOption = Annotated[
    bool, typer.Option(
        "--json", help="For programs: one JSON object a message, with the names of the HTTP API (message_id, priority, "
        "enqueued_at, …); the payload is payload_text, or payload in base64 if it is not UTF-8.",
    ),
]  # fmt: skip
TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic: name, or namespace/name.")]


# -- for programs ------------------------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """A struct or plain values, on one line."""
    sys.stdout.write(json_line(value) + "\n")


def print_infos(infos: Iterable[MessageInfo]) -> None:
    for info in infos:
        print_json(tell_message(info, "text"))


def print_popped(messages: Iterable[Message]) -> None:
    for m in messages:
        print_json(
            PoppedTold(
                message_id=m.message_id, id=str(m.id), lease_token=str(m.token), priority=m.priority,
                attempts=m.attempts, enqueued_at=m.enqueued_at, deadline=m.deadline, partition=m.partition, key=m.key,
                fairness_key=m.fairness_key, headers=m.headers or None, **shown(m.payload, "text"),
            )
        )  # fmt: skip


# -- for people --------------------------------------------------------------------------------------------------------


def harmless(text: str, *, lines: bool = False) -> Text:
    r"""Text that only shows itself: what is not printable is spelled out, and nothing in it is markup.

    >>> harmless("[red]\x1b[31m").plain
    '[red]\\x1b[31m'
    """
    kept = ("\n", "\t") if lines else ()
    return Text("".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text))


def whole(payload: bytes | None) -> Text:
    """All of a text; of other bytes how many they are, and the first."""
    if payload is None:
        return Text("not kept", "dim")
    try:
        return harmless(payload.decode(), lines=True) if payload else Text("empty", "dim")
    except UnicodeDecodeError:
        more = " …" if len(payload) > HEX_BYTES else ""
        return Text.assemble((f"{size(len(payload))}, not text: ", "dim"), payload[:HEX_BYTES].hex(" "), more)


def preview(payload: bytes | None) -> Text:
    """Its beginning, on one line."""
    try:
        text = (payload or b"").decode()
    except UnicodeDecodeError:
        text = ""
    if not text:
        return whole(payload)
    return harmless(text if len(text) <= PREVIEW else text[: PREVIEW - 1] + "…")


def ago(at: datetime | None) -> str:
    """How long since, or how long until."""
    if at is None:
        return ""
    seconds = (datetime.now(UTC) - at).total_seconds()
    return f"in {_about(-seconds)}" if seconds < 0 else f"{_about(seconds)} ago"


def _about(seconds: float) -> str:
    return span(round(seconds) if seconds >= 1 else seconds) if seconds >= 0.001 else "0s"


def show_messages(console: Console, infos: Sequence[MessageInfo], *, dead: bool = False) -> None:
    """One line a message: payloads are cut to the terminal, ids never; a reason may take several lines."""
    names = ("message_id", "prio", "died", "reason") if dead else ("message_id", "prio", "tries", "age")
    cells: list[tuple[str | Text, ...]] = [
        (m.message_id, str(m.priority), *((ago(m.ended_at), harmless(m.reason or "")) if dead else _tried(m)))
        for m in infos
    ]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    if dead:
        widths[-1] = min(widths[-1], REASON_WIDTH)
    table = Table(box=ROUNDED)
    for name, width in zip(names, widths, strict=True):
        justify: Any = "right" if name in ("prio", "tries", "age") else "left"
        table.add_column(name, justify=justify, width=width, overflow="fold")
    room = console.width - sum(widths) - 3 * len(widths) - 4  # borders, and a blank on either side
    table.add_column("payload", no_wrap=True, overflow="ellipsis", max_width=max(room, len("payload")))
    for m, row in zip(infos, cells, strict=True):
        table.add_row(*row, preview(m.payload))
    console.print(table)


def _tried(m: MessageInfo) -> tuple[str, str]:
    return str(m.attempts), ago(m.enqueued_at).removesuffix(" ago")


def message_facts(info: MessageInfo) -> list[tuple[str | Text, str | Text]]:
    """Everything that is known of a message, for a table of facts; what is not known is left out."""
    facts: list[tuple[str | Text, str | Text]] = [
        ("message_id", info.message_id), ("state", f"[bold]{info.state}[/bold]"),
        ("priority", "" if info.priority is None else str(info.priority)),
        ("deliveries so far", count(info.attempts)), ("partition", str(info.partition)),
        ("key", harmless(info.key or "")), ("fairness key", harmless(info.fairness_key or "")),
    ]  # fmt: skip
    moments = {
        "enqueued": info.enqueued_at, "due": info.due_at, "expires": info.expires_at, "leased until": info.deadline,
        "ended": info.ended_at,
    }  # fmt: skip
    facts += [(name, f"{clock(at)} ({ago(at)})") for name, at in moments.items() if at is not None]
    facts += [("leased by", harmless(info.holder or "")), ("reason", harmless(info.reason or ""))]
    facts += [(Text.assemble("header ", harmless(name)), harmless(value)) for name, value in info.headers.items()]
    facts += [("payload", whole(info.payload))]
    return [(name, told) for name, told in facts if told]


def clock(at: datetime) -> str:
    """
    >>> clock(datetime(2030, 1, 31, 12, tzinfo=UTC))
    '2030-01-31 12:00:00Z'
    """
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def show_popped(console: Console, messages: Iterable[Message]) -> None:
    for m in messages:
        head = f" priority {m.priority}, delivery {m.attempts}, enqueued {ago(m.enqueued_at)}"
        key = Text.assemble(", key ", harmless(m.key)) if m.key is not None else Text()
        console.print(Text.assemble((m.message_id, "bold"), (head, "dim"), key))
        for name, value in m.headers.items():
            console.print(Text.assemble(harmless(name), ": ", harmless(value), style="dim"))
        console.print(whole(m.payload))
