"""`heapline group read TOPIC --group G`: be a member of a group, show its rows, and ack them.

They are shown before they are acked: whatever goes wrong between, a row is seen twice rather than never.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from heapline.broker import GroupBroker, Subscription
from heapline.cli.connection import over_network
from heapline.cli.group_words import PLACE_HELP, member_shown, place, rows_word
from heapline.cli.messages import TopicArgument, ago, harmless, print_json, whole
from heapline.cli.present import make_console
from heapline.cli.units import duration
from heapline.streams import StreamBatch, StreamMessage
from heapline.wire.json_groups import StreamRow
from heapline.wire.json_shapes import shown

NOTHING = 3  # exit code
AT_ONCE = 1000  # rows out at a time


@over_network
async def read_command(
    hl: GroupBroker, topic: TopicArgument,
    group: Annotated[str, typer.Option("--group", "-g", help="The group to read for; made if it is not there.")],
    max_rows: Annotated[int | None, typer.Option("--max", "-n", min=1, help="At most so many rows.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C, as rows come.")] = False,
    wait: Annotated[
        float, typer.Option(
            "--wait", "-w", metavar="DURATION", parser=duration, help="End when nothing has come for this long."
        ),
    ] = "1s",  # type: ignore[assignment]
    ack: Annotated[
        bool, typer.Option("--ack/--no-ack", help="Done when shown; without, the group sees them again at once.")
    ] = True,
    member: Annotated[str | None, typer.Option("--member", help="The member's name; one of its own else.")] = None,
    start: Annotated[Any, typer.Option(
        "--start", metavar="WHERE", parser=place, help=f"Where a new group begins: {PLACE_HELP}"
    )] = "earliest",
    as_json: Annotated[
        bool, typer.Option(
            "--json", help="For programs: one JSON object a row: partition, offset, message_id, attempts, priority, "
            "enqueued_at, key, headers, payload_text or payload.",
        ),
    ] = False,
) -> None:  # fmt: skip
    """Read a topic as a member of a group: rows in the order in which they fell due, each acked once it is shown.

    Example:  [cyan]heapline group read jobs --group billing[/cyan]

    Follow it:  [cyan]heapline group read jobs -g billing -f --json | my-program[/cyan]

    Only look, and leave everything as it is:  [cyan]heapline group read jobs -g billing --no-ack[/cyan]

    Other members of the group get other partitions. Exit code 3 if nothing was there.
    """
    credits = AT_ONCE if max_rows is None else min(max_rows, AT_ONCE)
    reading = Reading(make_console(), max_rows, as_json, ack)
    async with hl.subscribe(
        topic, group=group, member=member, credits=credits, batches=True, start=start
    ) as subscription:
        await reading.run(subscription, None if follow else wait)
    if not reading.seen:
        if not as_json:
            make_console(stderr=True).print(await _why_nothing(hl, topic, group))
        raise typer.Exit(NOTHING)
    if not as_json:
        done = "acked" if ack else "not acked: the group sees them again"
        make_console(stderr=True).print(f"[dim]{rows_word(reading.seen)} {done}[/dim]")


class Reading:
    """Rows from a subscription to the terminal, so many of them."""

    def __init__(self, console: Console, limit: int | None, as_json: bool, ack: bool) -> None:
        self._console, self._limit, self._as_json, self._ack = console, limit, as_json, ack
        self.seen = 0

    async def run(self, subscription: Subscription, wait: float | None) -> None:
        rows = aiter(subscription)
        while self._limit is None or self.seen < self._limit:
            try:
                async with asyncio.timeout(wait):
                    batch = await anext(rows, None)
            except TimeoutError:
                return
            if batch is None:
                return
            await self._take(subscription, batch)
            if not self._ack and self.seen >= AT_ONCE:
                return  # no more come while these are out

    async def _take(self, subscription: Subscription, batch: StreamBatch) -> None:
        left = len(batch) if self._limit is None else min(len(batch), self._limit - self.seen)
        show(self._console, batch.messages()[:left], self._as_json)
        sys.stdout.flush()
        self.seen += left
        if self._ack:
            await subscription.ack({batch.partition: batch.offsets[:left].tolist()})


def show(console: Console, rows: Iterable[StreamMessage], as_json: bool) -> None:
    for m in rows:
        if as_json:
            print_json(_told(m))
            continue
        head = f" attempt {m.attempts}, priority {m.priority}, enqueued {ago(m.enqueued_at)}"
        key = Text.assemble(", key ", harmless(m.key)) if m.key is not None else Text()
        console.print(Text.assemble((f"{m.partition}:{m.offset} {m.message_id}", "bold"), (head, "dim"), key))
        for name, value in m.headers.items():
            console.print(Text.assemble(harmless(name), ": ", harmless(value), style="dim"))
        console.print(whole(m.payload))


def _told(m: StreamMessage) -> StreamRow:
    return StreamRow(
        partition=m.partition, offset=m.offset, message_id=m.message_id, id=str(m.id), priority=m.priority,
        attempts=m.attempts, enqueued_at=m.enqueued_at, key=m.key, fairness_key=m.fairness_key,
        headers=m.headers or None, **shown(m.payload, "text"),
    )  # fmt: skip


async def _why_nothing(hl: GroupBroker, topic: str, group: str) -> str:
    offsets = await hl.group_offsets(topic, group)
    lag = sum(o.lag for o in offsets)
    text = f"nothing came for group [bold]{escape(group)}[/bold] of {escape(topic)}"
    if not lag:
        return f"{text}: it has read everything"
    readers = sorted({o.member for o in offsets if o.member is not None})
    others = f"; read by {', '.join(map(member_shown, readers))}" if readers else ""
    return f"{text} ({rows_word(lag)} behind{others}; --wait 1m waits longer)"
