"""`heapline explain`, `history`, `search`, `series` and `lease`: order, lives, text, rates and holders of messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from msgspec import Meta
from rich.table import Table
from rich.text import Text

from heapline.cli.connection import NetworkGroup, TopicArgument, over_network
from heapline.cli.message_view import ago, clock, empty_topic_help
from heapline.cli.options import Past, span
from heapline.cli.output import Output, bold, columns_table, count, counted, harmless, timestamp
from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest
from heapline.contract.inspection import (
    ExplainedMessage,
    FoundMessage,
    HeldLease,
    MessageEvent,
    TopicSeries,
    WorkerInfo,
)
from heapline.wire.json_forms import to_json


@over_network(
    example="jobs -n 3",
    json="one object per message: message, line (1 is the next), text, age, effective_priority and turns_ahead.",
)
async def explain(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    message_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="Only this message, in whatever state it is.")
    ] = None,
    limit: Annotated[int, "-n", "Maximum number of messages."] = 10,
) -> None:
    """Show which messages would be popped next and why, best first.

    Why one message waits:  [cyan]heapline explain jobs 01JGXV0Z000000G7M9QK2V4T8B[/cyan]
    """
    found = await hl.explain(topic, limit, message_id)
    empty = "" if found.items or out.as_json else await empty_topic_help(hl, topic)
    for hold in found.holds:
        out.note(Text.assemble(harmless(hold.text), f" It holds back up to {count(hold.count)}."), "yellow")
    out.rows(found.items, _table, empty=empty, json=to_json)


def _table(items: list[ExplainedMessage]) -> Table:
    rows = [(str(item.line or ""), item.message.message_id, harmless(item.text)) for item in items]
    return columns_table("", ("line", "message_id", "why"), rows, right=(0,))


@over_network(
    example="jobs 01JGXV0Z000000G7M9QK2V4T8B",
    json="one object per event, oldest first: kind, at, holder, deadline, due_at, reason, …",
)
async def history(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="Message id, as put and peek print it.")],
) -> None:
    """Show what happened to one message, from the journal.

    It was enqueued, became due, was leased by whom, nacked why, acked or dead.
    """
    cursor: str | None = None
    events: list[MessageEvent] = []
    while True:
        page = await hl.message_history(topic, message_id, cursor=cursor)
        events += page.items
        cursor = page.cursor
        if cursor is None:
            break
    if not page.is_complete and page.known_since is not None:
        out.note(f"the journal before {clock(page.known_since)} was reclaimed; what happened earlier is not known")
    out.rows(events, _events_table, empty="nothing is known of it", json=to_json)


def _events_table(events: list[MessageEvent]) -> Table:
    return columns_table("", ("time", "event", "details"), [(clock(e.at), e.kind, _details(e)) for e in events])


def _details(event: MessageEvent) -> Text:
    facts: list[str] = []
    if event.attempts is not None:
        facts.append(f"delivery {event.attempts}")
    if event.priority is not None:
        facts.append(f"priority {event.priority}")
    texts = {"by": event.holder, "because": event.reason, "group": event.group, "batch": event.batch}
    facts += [f"{name} {text!r}" for name, text in texts.items() if text is not None]
    times = {"until": event.deadline, "due": event.due_at}
    facts += [f"{name} {clock(at)}" for name, at in times.items() if at is not None]
    return harmless(", ".join(facts))


@over_network(
    example="jobs order-4711",
    json="one object per message: message, where (key, payload, header NAME) and excerpt.",
)
async def search(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Text in payload, key or headers, ignoring case.")
    ] = None,
    key: Annotated[str | None, "Only this partition key."] = None,
    header: Annotated[str | None, "-H", "Only messages with this header: NAME=VALUE, or a name."] = None,
    state: Annotated[str | None, "Only messages that are ready, delayed, leased or dead."] = None,
    limit: Annotated[int, "-n", "Maximum number of messages.", Meta(ge=1)] = 50,
) -> None:
    """Show the messages in a topic that contain a text. Reads all of them, the oldest first."""
    if text is None and key is None and header is None:
        raise BadRequest("nothing to search for; give a TEXT, --key or --header")
    found: list[FoundMessage] = []
    cursor: str | None = None
    query: Any = {"key": key, "header": header, "state": state}
    while len(found) < limit:
        page = await hl.search_messages(topic, text, limit=min(limit - len(found), 1000), cursor=cursor, **query)
        found += page.items
        cursor = page.cursor
        if cursor is None:
            break
        if out.console.is_terminal:
            out.note(f"{count(page.read)} of {count(page.total)} messages read", "dim")
    out.rows(found, _found_table, empty="no message matches", json=to_json, limit=limit)


def _found_table(found: list[FoundMessage]) -> Table:
    rows = [(row.message.message_id, row.message.state, harmless(row.where), harmless(row.excerpt)) for row in found]
    return columns_table("", ("message_id", "state", "where", "text"), rows)


@over_network(example="jobs", json="one object with lists of equal length: times, ready, delayed, leased, dead, …")
async def series(
    hl: Broker,
    out: Output,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="Topic. Default: all together.")] = None,
    since: Annotated[Past | None, "Only points after this time, or this long ago, such as 2h."] = None,
) -> None:
    """Show depths and rates over the last 24 hours, of a topic or of all."""
    found = await hl.stats_series(topic, since)
    if out.as_json:
        out.row(found)
    elif not found.interval:
        raise BadRequest("this broker keeps no series; use a server with the log broker")
    else:
        out.rows(
            list(_rows(found)),
            _series_table,
            empty="no figures for that time; a server records them every 10 seconds while a topic changes",
        )


def _rows(found: TopicSeries) -> Iterator[tuple[str, ...]]:
    depths = zip(found.ready, found.delayed, found.leased, found.dead, strict=True)
    done = zip(found.seconds, found.enqueued, found.done, found.failed, strict=True)
    for at, now, (seconds, *sums), wait in zip(found.times, depths, done, found.oldest_wait, strict=True):
        rates = (f"{total / seconds:.3g}" for total in sums)
        yield timestamp(at * 1000), *map(count, now), *rates, span(wait) if wait else ""


def _series_table(rows: list[tuple[str, ...]]) -> Table:
    names = ("time", "ready", "delayed", "leased", "dead", "in/s", "done/s", "failed/s", "oldest wait")
    return columns_table("", names, rows, right=tuple(range(1, len(names))))


# -- leases ------------------------------------------------------------------------------------------------------------

IdsArgument = Annotated[list[str], typer.Argument(metavar="ID...", help="Message ids, as lease list prints them.")]

app = NetworkGroup("lease", example="lease list jobs", more="A lease is the time for which a worker has a message.")


@app.call("list", example="jobs --holder worker-7", json="one object per lease: message_id, holder, since, deadline, …")
async def list_command(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    holder: Annotated[str | None, "Only leases of this holder."] = None,
    limit: Annotated[int, "-n", "Maximum number of leases.", Meta(ge=1)] = 100,
) -> None:
    """List the leases of a topic, the oldest first."""
    found = await hl.list_leases(topic, limit, holder=holder)
    out.rows(found, _leases, empty=f"nothing is leased in {bold(topic)}", json=to_json, limit=limit)


def _leases(found: list[HeldLease]) -> Table:
    rows = [
        (row.message_id, harmless(row.holder or ""), ago(row.since), ago(row.deadline), str(row.attempts))
        for row in found
    ]
    return columns_table("", ("message_id", "holder", "since", "ends", "delivery"), rows, right=(4,))


@app.call("end", example="jobs 01JGXV0Z000000G7M9QK2V4T8B --reason 'worker hangs'", json='{"count": NUMBER}.')
async def end_command(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    ids: IdsArgument,
    reason: Annotated[str | None, "Recorded with the messages and in the audit log."] = None,
) -> None:
    """Remove messages from their holders; they are redelivered after the topic's backoff, which counts as a delivery.

    A holder that works on such a message cannot acknowledge it any more.
    """
    ended = await hl.end_leases(topic, list(ids), reason=reason)
    out.row({"count": ended}, f"{counted(ended, 'lease')} of {bold(topic)} ended")


@app.call("holders", example="", json="one object per topic and holder: leases, waiting, rate and last_lease_at.")
async def holders_command(hl: Broker, out: Output) -> None:
    """List who takes messages from which topic, now or in the last hour."""
    out.rows(await hl.list_workers(), _workers, empty="no message was leased in the last hour", json=to_json)


def _workers(found: list[WorkerInfo]) -> Table:
    rows = [
        (
            harmless(worker.topic),
            harmless(worker.holder),
            count(worker.leases),
            count(worker.waiting),
            f"{worker.rate:.3g}/s",
            ago(worker.last_lease_at),
        )
        for worker in found
    ]
    return columns_table("", ("topic", "holder", "leases", "waiting", "rate", "last lease"), rows, right=(2, 3, 4))
