"""Print messages: JSON with the names of the HTTP API, and tables for people.

Other programs wrote the content of a message. Nothing in it may move the cursor or change the colors of a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from heapline.cli.options import span
from heapline.cli.output import Output, bold, count, depths, harmless, size
from heapline.contract.broker import Broker
from heapline.contract.errors import HeaplineError
from heapline.contract.message import Message, MessageInfo, TopicStats
from heapline.contract.stream import StreamMessage
from heapline.wire.json_forms import to_json
from heapline.wire.json_values import show_payload

PREVIEW = 100  # characters of a payload in a table
HEX_BYTES = 16
REASON_WIDTH = 20
JSON_HELP = (
    "one object per message, with the names of the HTTP API (message_id, priority, enqueued_at, …); the payload is "
    "payload_text, or payload in base64 if it is not UTF-8."
)
Facts = list[tuple[str | Text, str | Text | None]]


# -- for programs ------------------------------------------------------------------------------------------------------


def message_json(info: Any) -> Any:
    """Return a message, dead letter or schedule, with its payload as text if it is."""
    return to_json(info, "text")


def delivered_json(message: Message | StreamMessage, *more: str) -> dict[str, Any]:
    """Return the fields that popped messages and stream rows share, and those named in `more`."""
    names = ("message_id", "partition", "priority", "enqueued_at", "key", "fairness_key", *more)
    fields = {name: value for name in names if (value := getattr(message, name)) is not None}
    headers = {"headers": message.headers} if message.headers else {}
    return {"id": str(message.id), **fields, **headers, **show_payload(message.payload, "text")}


# -- for people --------------------------------------------------------------------------------------------------------


def full_payload(payload: bytes | None) -> Text:
    """Return the complete payload if it is text, otherwise its size and its first bytes."""
    if payload is None:
        return Text("not kept", "dim")
    try:
        return harmless(payload.decode(), lines=True) if payload else Text("empty", "dim")
    except UnicodeDecodeError:
        more = " …" if len(payload) > HEX_BYTES else ""
        return Text.assemble((f"{size(len(payload))}, not text: ", "dim"), payload[:HEX_BYTES].hex(" "), more)


def preview(payload: bytes | None) -> Text:
    """Return the beginning of a payload, on one line."""
    try:
        text = (payload or b"").decode()
    except UnicodeDecodeError:
        text = ""
    if not text:
        return full_payload(payload)
    return harmless(text if len(text) <= PREVIEW else text[: PREVIEW - 1] + "…")


def ago(at: datetime | None) -> str:
    """Return how long ago a time was, or how long it is until then."""
    if at is None:
        return ""
    seconds = (datetime.now(UTC) - at).total_seconds()
    return f"in {rounded(-seconds)}" if seconds < 0 else f"{rounded(seconds)} ago"


def rounded(seconds: float | None) -> str:
    """Return a duration in whole seconds, or in milliseconds if it is shorter than a second."""
    return "" if seconds is None else span(round(seconds) if seconds >= 1 else seconds)


def states_of(stats: TopicStats) -> dict[str, int]:
    return {"ready": stats.ready, "delayed": stats.delayed, "leased": stats.leased, "dead": stats.dead}


def clock(at: datetime) -> str:
    """
    >>> clock(datetime(2030, 1, 31, 12, tzinfo=UTC))
    '2030-01-31 12:00:00Z'
    """
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def moment(at: datetime | None) -> str:
    """Return a time, and how long ago it was."""
    return "" if at is None else f"{clock(at)} ({ago(at)})"


def messages_table(console: Console, infos: Sequence[MessageInfo], *, dead: bool = False) -> Table:
    """Return a table with one line per message. Payloads are cut to the width of the terminal, ids never."""
    names = ("message_id", "prio", "died", "reason") if dead else ("message_id", "prio", "tries", "age")
    cells: list[tuple[str | Text, ...]] = [
        (m.message_id, str(m.priority), ago(m.ended_at), harmless(m.reason or ""))
        if dead
        else (m.message_id, str(m.priority), str(m.attempts), ago(m.enqueued_at).removesuffix(" ago"))
        for m in infos
    ]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    if dead:
        widths[-1] = min(widths[-1], REASON_WIDTH)
    table = Table(box=ROUNDED)
    for name, width in zip(names, widths, strict=True):
        justify: Any = "right" if name in ("prio", "tries", "age") else "left"
        table.add_column(name, justify=justify, width=width, overflow="fold")
    left = console.width - sum(widths) - 3 * len(widths) - 4  # borders, and a blank on either side
    table.add_column("payload", no_wrap=True, overflow="ellipsis", max_width=max(left, len("payload")))
    for m, row in zip(infos, cells, strict=True):
        table.add_row(*row, preview(m.payload))
    return table


def message_facts(info: MessageInfo) -> Facts:
    """Return everything that is known about a message, for a table of facts."""
    priority = "" if info.priority is None else str(info.priority)
    facts: Facts = [("message_id", info.message_id), ("state", f"[bold]{info.state}[/bold]"), ("priority", priority)]
    facts += [("deliveries so far", count(info.attempts)), ("partition", str(info.partition))]
    facts += [("key", harmless(info.key or "")), ("fairness key", harmless(info.fairness_key or ""))]
    times = {"enqueued": info.enqueued_at, "due": info.due_at, "expires": info.expires_at}
    times |= {"leased until": info.deadline, "ended": info.ended_at}
    facts += [(name, moment(at)) for name, at in times.items()]
    facts += [("leased by", harmless(info.holder or "")), ("reason", harmless(info.reason or ""))]
    facts += [(Text.assemble("header ", harmless(name)), harmless(value)) for name, value in info.headers.items()]
    return [*facts, ("payload", full_payload(info.payload))]


def print_messages(out: Output, messages: Iterable[Message]) -> None:
    for m in messages:
        lease = {"lease_token": str(m.token), "deadline": m.deadline}
        out.row(delivered_json(m, "attempts") | lease, *_full_message(m.message_id, f"delivery {m.attempts}", m))


def print_stream_rows(out: Output, rows: Iterable[StreamMessage]) -> None:
    for m in rows:
        title = f"{m.partition}:{m.offset} {m.message_id}"
        out.row(delivered_json(m, "offset", "attempts"), *_full_message(title, f"attempt {m.attempts}", m))


def _full_message(title: str, tries: str, m: Message | StreamMessage) -> list[Text]:
    head = f" priority {m.priority}, {tries}, enqueued {ago(m.enqueued_at)}"
    key = Text.assemble(", key ", harmless(m.key)) if m.key is not None else Text()
    headers = [Text.assemble(harmless(n), ": ", harmless(value), style="dim") for n, value in m.headers.items()]
    return [Text.assemble((title, "bold"), (head, "dim"), key), *headers, full_payload(m.payload)]


async def empty_topic_help(hl: Broker, topic: str) -> str:
    """Explain an empty result: the topic is empty or paused, or its messages are delayed, leased or dead."""
    text = f"no message is ready in {bold(topic)}"
    try:
        stats = await hl.stats(topic)
    except HeaplineError:
        return text  # the caller may lack the right to read statistics
    if stats.paused:
        text += "; the topic is [yellow]paused[/yellow]"
    held = depths({state: number for state, number in states_of(stats).items() if number})
    return f"{text} ({held})" if held else f"{text}: it is empty"
