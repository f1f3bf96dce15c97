"""`heapline put TOPIC`: one message from an argument or stdin, or a file of them (put_file.py)."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from heapline.broker import Broker
from heapline.cli.asking import interruptible
from heapline.cli.connection import over_network
from heapline.cli.messages import TopicArgument, print_json
from heapline.cli.present import make_console
from heapline.cli.put_file import BATCH, put_file
from heapline.cli.units import duration, moment, pair
from heapline.errors import BadRequest
from heapline.model import Enqueued, Outgoing
from heapline.wire.json_shapes import tell_enqueued

FILE = "From a file"


@over_network
async def put(
    hl: Broker, topic: TopicArgument,
    payload: Annotated[
        str | None, typer.Argument(metavar="PAYLOAD", help="The message, as text; without it, or with -, stdin.")
    ] = None,
    priority: Annotated[
        int, typer.Option("--priority", "-p", help="The smallest is served first, or the largest on a max topic.")
    ] = 0,
    delay: Annotated[
        float | None, typer.Option("--delay", metavar="DURATION", parser=duration, help="Not before this: 30s, 2h, …")
    ] = None,
    at: Annotated[
        datetime | None, typer.Option(
            "--at", metavar="WHEN", parser=moment, help="Not before this moment: 2030-01-31T12:00:00Z.",
        ),
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="Messages of one key lie in one partition.")] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header; may be given again.")
    ] = None,
    ttl: Annotated[
        float | None, typer.Option(
            "--ttl", metavar="DURATION", parser=duration, help="It expires if nobody takes it so long after it is due.",
        ),
    ] = None,
    max_retries: Annotated[
        int | None, typer.Option("--max-retries", help="Deliveries after the first; the topic's if not given.")
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(
            "--idempotency-key", help="Repeating the command with the same key changes nothing. With --file each line "
            "gets this and its number, so an import that broke off is just started again.",
        ),
    ] = None,
    idempotency_scope: Annotated[
        str | None, typer.Option(
            "--idempotency-scope", metavar="SCOPE", help="How long the key holds: window (the topic's dedup_window), "
            "pending (until it is first leased) or until_ack (until it is gone); window if not given.",
        ),
    ] = None,
    fairness_key: Annotated[
        str | None, typer.Option("--fairness-key", help="Who takes turns, on topics with fairness between keys.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(
            "--file", "-f", rich_help_panel=FILE, help="A file of JSON lines, or - for stdin: each line is a payload, "
            "stored as it is written, and the options above hold for each.",
        ),
    ] = None,
    messages: Annotated[
        bool, typer.Option(
            "--messages", rich_help_panel=FILE, help='Each line is a whole message instead: {"payload_json": …, '
            '"priority": 5, "delay": 10, …}, with payload_text or payload (base64) if it is no JSON.',
        ),
    ] = False,
    batch: Annotated[
        int, typer.Option("--batch", min=1, max=10_000, rich_help_panel=FILE, help="Lines that go in together.")
    ] = BATCH,
    as_json: Annotated[
        bool, typer.Option(
            "--json", help="For programs: message_id, id and duplicate of a message; of a file the numbers of lines, "
            "enqueued, duplicates and refused, and the first errors with their lines.",
        ),
    ] = False,
) -> None:  # fmt: skip
    """Put a message into a topic, or a file of them. When this ends well, they are durable.

    Example:  [cyan]heapline put jobs '{"order": 7}' --priority 5 --delay 30s[/cyan]

    From a pipe:  [cyan]pg_dump shop | gzip | heapline put dumps[/cyan]

    Many, and safe to repeat:  [cyan]heapline put jobs --file orders.jsonl --idempotency-key monday[/cyan]
    """
    settings: dict[str, Any] = {
        "priority": priority, "delay": delay, "deliver_at": at, "key": key, "ttl": ttl, "max_retries": max_retries,
        "headers": dict(pair(text) for text in header or ()) or None, "idempotency_key": idempotency_key,
        "idempotency_scope": idempotency_scope, "fairness_key": fairness_key,
    }  # fmt: skip
    if file is not None:
        if payload is not None:
            raise BadRequest("give a payload or --file, not both")
        await put_file(hl, topic, file, settings, whole=messages, batch_lines=batch, as_json=as_json)
        return
    if messages:
        raise BadRequest("--messages tells how lines are read: name a file with --file")
    content = payload.encode("utf-8", "surrogateescape") if payload not in (None, "-") else _stdin()
    (result,) = await hl.enqueue_batch(topic, [Outgoing(content, **settings)], atomic=False)
    if result.error is not None:
        raise result.error
    if as_json:
        print_json(tell_enqueued(result))
    else:
        _say(topic, result)


def _stdin() -> bytes:
    """As it is, to the last byte: a line break at the end belongs to it."""
    if sys.stdin.isatty():
        typer.echo("type the message, then Ctrl-D", err=True)
    with interruptible():
        content = sys.stdin.buffer.read()
    if not content:
        raise BadRequest("stdin was empty: write the message after the topic; an empty one is put with ''")
    return content


def _say(topic: str, result: Enqueued) -> None:
    what = "was there already" if result.duplicate else f"is in [bold]{escape(topic)}[/bold]"
    make_console().print(f"message [bold]{result.message_id}[/bold] {what}")
