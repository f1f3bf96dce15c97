"""`heapline put`, `peek`, `pop`, `get`, `cancel` and `reschedule`: the messages of a topic."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import typer
from msgspec import Meta

from heapline.cli import put_file
from heapline.cli.connection import TopicArgument, over_network
from heapline.cli.message_view import (
    JSON_HELP,
    clock,
    empty_topic_help,
    message_facts,
    message_json,
    messages_table,
    print_messages,
)
from heapline.cli.options import Pair, Panel, Seconds, Time, Value, pair
from heapline.cli.output import Output, bold, counted, facts_table, interruptible, make_console
from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest, HeaplineError
from heapline.contract.message import Message, Outgoing
from heapline.wire.json_forms import to_json

NOTHING = 3  # exit code of a pop that got no message
POP_MAX = 1000  # messages of one call
PANEL = Panel("Message")

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Message id, as put and peek print it.")]
IdsArgument = Annotated[list[str], typer.Argument(metavar="ID...", help="Message ids, as put and peek print them.")]


_PRIORITY = "Smallest first, or largest first if the topic's mode is max."
_TTL = "Expire the message if it is not leased this long after it is due."
_RETRIES = "Deliveries after the first. Default: the topic's max_retries_default."
_FAIRNESS = "Key that takes turns with other keys, if the topic's fairness is keys."


def message_fields(
    priority: Annotated[int, "-p", _PRIORITY, PANEL] = 0,
    key: Annotated[str | None, "Partition key: messages with equal keys are in one partition.", PANEL] = None,
    header: Annotated[list[Pair] | None, "-H", "Add a header; repeatable.", PANEL] = None,
    ttl: Annotated[Seconds | None, _TTL, PANEL] = None,
    max_retries: Annotated[int | None, _RETRIES, PANEL] = None,
    fairness_key: Annotated[str | None, _FAIRNESS, PANEL] = None,
) -> dict[str, Any]:
    """Return the fields of a message that `put` and `schedule create` set alike."""
    headers = dict(map(pair, header or ())) or None
    fields = {"priority": priority, "key": key, "headers": headers, "ttl": ttl}
    return {**fields, "max_retries": max_retries, "fairness_key": fairness_key}


@over_network(
    example="jobs '{\"order\": 7}' --priority 5 --delay 30s",
    json="message_id, id and duplicate of a message; for a file the numbers of lines, enqueued, duplicates and "
    "refused, and the first errors with their line numbers.",
    message=message_fields,
    lines=put_file.Lines,
)
async def put(
    hl: Broker,
    out: Output,
    message: dict[str, Any],
    lines: put_file.Lines,
    topic: TopicArgument,
    payload: Annotated[
        str | None, typer.Argument(metavar="PAYLOAD", help="Message text. Default, or with -: read stdin.")
    ] = None,
    delay: Annotated[Seconds | None, "Deliver no earlier than this from now: 30s, 2h."] = None,
    at: Annotated[Time | None, "Deliver no earlier than this time: 2030-01-31T12:00:00Z."] = None,
    idempotency_key: Annotated[
        str | None,
        "Make repeating the command safe: the same key enqueues once. With --file each line uses this key and its "
        "line number, so you can restart an interrupted import.",
    ] = None,
    idempotency_scope: Annotated[
        str | None,
        "How long the key is valid: window (the topic's dedup_window), pending (until the message is first leased) "
        "or until_ack (until it is removed). Default: window.",
        Value("SCOPE"),
    ] = None,
) -> None:
    """Enqueue a message, or a file of messages. They are durable when the command succeeds.

    From a pipe:  [cyan]pg_dump shop | gzip | heapline put dumps[/cyan]

    Many messages, safe to repeat:  [cyan]heapline put jobs --file orders.jsonl --idempotency-key monday[/cyan]
    """
    keys = {"idempotency_key": idempotency_key, "idempotency_scope": idempotency_scope}
    settings = {**message, "delay": delay, "deliver_at": at, **keys}
    if lines.file is not None:
        if payload is not None:
            raise BadRequest("a payload and --file exclude each other; omit one")
        await put_file.put_file(hl, out, topic, lines, settings)
        return
    if lines.messages:
        raise BadRequest("--messages needs --file FILE")
    content = payload.encode("utf-8", "surrogateescape") if payload not in (None, "-") else _read_stdin()
    (result,) = await hl.enqueue_batch(topic, [Outgoing(content, **settings)], atomic=False)
    if result.error is not None:
        raise result.error
    outcome = "was already enqueued" if result.duplicate else f"enqueued in {bold(topic)}"
    out.row(to_json(result), f"message {bold(result.message_id)} {outcome}")


def _read_stdin() -> bytes:
    """Read stdin to the last byte. A line break at the end is part of the message."""
    if sys.stdin.isatty():
        typer.echo("type the message, then Ctrl-D", err=True)
    with interruptible():
        content = sys.stdin.buffer.read()
    if not content:
        raise BadRequest("stdin is empty; write the message after the topic, or '' for an empty message")
    return content


@over_network(example="jobs -n 3", json=JSON_HELP)
async def peek(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    limit: Annotated[int, "-n", "Maximum number of messages."] = 10,
) -> None:
    """Show the messages that would be popped next, best first. Nothing is leased or changed."""
    infos = await hl.peek(topic, limit)
    empty = "" if infos or out.as_json else await empty_topic_help(hl, topic)
    out.rows(infos, lambda infos: messages_table(out.console, infos), empty=empty, json=message_json)


@over_network(example="jobs --ack", json=JSON_HELP)
async def pop(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    max_messages: Annotated[int, "--max -n", "Maximum number of messages.", Meta(ge=1)] = 1,
    ack: Annotated[bool, "Acknowledge the messages after they are printed, which removes them."] = False,
    wait: Annotated[Seconds, "-w", "Wait this long for the first message."] = 0.0,
    visibility: Annotated[Seconds | None, "Length of the lease. Default: the topic's visibility_default."] = None,
    holder: Annotated[str | None, "Name of the lease's holder. Default: your name at the server."] = None,
) -> None:
    """Lease the best messages that are due, and print them.

    Without --ack the messages are only leased: no other worker gets them until
    the lease ends. Then they are redelivered, which counts as a delivery.
    To look without leasing, use [cyan]heapline peek[/cyan].

    Exit code 3 if no message was due:  [cyan]while heapline pop jobs --ack --json >> done.jsonl; do :; done[/cyan]
    """
    taken, last = 0, None
    while taken < max_messages:
        wanted = min(max_messages - taken, POP_MAX)
        messages = await hl.pop(topic, wanted, visibility=visibility, wait=0.0 if taken else wait, holder=holder)
        if not messages:
            break
        # Print before acking: if the command fails in between, a message is printed twice rather than never.
        try:
            print_messages(out, messages)
            sys.stdout.flush()
        except (OSError, SystemExit):  # a broken pipe or a full disk: release the messages for other workers
            await hl.release(messages)
            raise
        if ack:
            await hl.ack(messages)
        taken, last = taken + len(messages), messages[-1]
    if last is None:
        if not out.as_json:
            out.note(await empty_topic_help(hl, topic))
        raise typer.Exit(NOTHING)
    out.note(_pop_summary(taken, ack, last), "dim")


def _pop_summary(taken: int, ack: bool, last: Message) -> str:
    them = counted(taken, "message")
    if ack:
        return f"{them} acked and removed from the topic"
    return (
        f"{them} leased until {clock(last.deadline)}, not acked; redelivered after that. Use --ack to remove what is "
        "printed, or heapline peek to look without leasing"
    )


@over_network(example="jobs 01JGXV0Z000000G7M9QK2V4T8B", json=JSON_HELP)
async def get(hl: Broker, out: Output, topic: TopicArgument, message_id: IdArgument) -> None:
    """Show one message in any state, including recently removed ones."""
    info = await hl.get(topic, message_id)
    out.row(message_json(info), facts_table(bold(info.topic), message_facts(info)))


@over_network(
    example="jobs 01JGXV0Z000000G7M9QK2V4T8B", json='one object per message: {"message_id": ID, "cancelled": true}.'
)
async def cancel(hl: Broker, out: Output, topic: TopicArgument, ids: IdsArgument) -> None:
    """Remove waiting messages before they are delivered. Leased messages cannot be cancelled."""
    await _each(out, ids, "cancelled", lambda id: hl.cancel(topic, id))


@over_network(
    example="jobs 01JGXV0Z000000G7M9QK2V4T8B --delay 1h",
    json='one object per message: {"message_id": ID, "rescheduled": true}.',
)
async def reschedule(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    ids: IdsArgument,
    delay: Annotated[Seconds | None, "Deliver this long from now; 0s means now."] = None,
    at: Annotated[Time | None, "Deliver at this time: 2030-01-31T12:00:00Z."] = None,
    priority: Annotated[int | None, "-p", "New priority."] = None,
) -> None:
    """Change the due time or the priority of waiting messages. Settings that you omit stay as they are.

    Deliver now, before others:  [cyan]heapline reschedule jobs 01JGXV0Z000000G7M9QK2V4T8B --delay 0s -p -10[/cyan]
    """
    if delay is None and at is None and priority is None:
        raise BadRequest("no change given; use --delay, --at or --priority")
    if delay is not None and at is not None:
        raise BadRequest("--delay and --at exclude each other; omit one")
    change = {"delay": delay, "deliver_at": at, "priority": priority}
    await _each(out, ids, "rescheduled", lambda id: hl.reschedule(topic, id, **change))  # type: ignore[arg-type]


async def _each(out: Output, ids: list[str], outcome: str, change: Callable[[str], Awaitable[None]]) -> None:
    """Change every message, even after one that fails, and raise the first error at the end."""
    failed: list[HeaplineError] = []
    for id in dict.fromkeys(ids):
        try:
            await change(id)
        except HeaplineError as error:
            failed.append(error)
        else:
            out.row({"message_id": id, outcome: True}, f"message {bold(id)} {outcome}")
    for other in failed[1:]:
        make_console(stderr=True).print(f"{type(other).__name__}: {other}", style="red", markup=False)
    if failed:
        raise failed[0]
