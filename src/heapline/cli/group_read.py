"""`heapline group read TOPIC --group G`: read rows as a member of a group, print them, and ack them.

Rows are printed before they are acked: if the command fails in between, a row is printed twice rather than never.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer
from msgspec import Meta
from rich.markup import escape

from heapline.cli.connection import TopicArgument, over_network
from heapline.cli.message_view import print_stream_rows
from heapline.cli.options import Position, Seconds
from heapline.cli.output import Output, bold, counted, harmless
from heapline.cli.units import POSITION_HELP
from heapline.contract.broker import Broker
from heapline.contract.stream import StreamBatch
from heapline.contract.subscription import Subscription

NOTHING = 3  # exit code of a read that got no row
OUTSTANDING_MAX = 1000  # rows that are delivered and not acked


@over_network(
    json="one object per row: partition, offset, message_id, attempts, priority, enqueued_at, key, headers, "
    "payload_text or payload."
)
async def read_command(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    group: Annotated[str, "-g", "Group to read for; created if it does not exist."],
    max_rows: Annotated[int | None, "--max -n", "Maximum number of rows.", Meta(ge=1)] = None,
    follow: Annotated[bool, "-f", "Keep reading new rows until Ctrl-C."] = False,
    wait: Annotated[Seconds, "-w", "End when no row has arrived for this long."] = 1.0,
    ack: Annotated[
        bool, "--ack/--no-ack", "Ack rows after they are printed; otherwise the group reads them again."
    ] = True,
    member: Annotated[str | None, "Name of the member. Default: a new unique name."] = None,
    start: Annotated[Position, f"Where a new group starts: {POSITION_HELP}."] = "earliest",
) -> None:
    """Read a topic as a member of a group: rows in due order, each acked after it is printed.

    Example:  [cyan]heapline group read jobs --group billing[/cyan]

    Follow it:  [cyan]heapline group read jobs -g billing -f --json | my-program[/cyan]

    Only look, without changing anything:  [cyan]heapline group read jobs -g billing --no-ack[/cyan]

    Other members of the group read other partitions. Exit code 3 if no row arrived.
    """
    credits = OUTSTANDING_MAX if max_rows is None else min(max_rows, OUTSTANDING_MAX)
    reader = RowPrinter(out, max_rows, ack)
    async with hl.subscribe(
        topic, group=group, member=member, credits=credits, batches=True, start=start
    ) as subscription:
        await reader.run(subscription, None if follow else wait)
    if not reader.printed:
        if not out.as_json:
            out.note(await _empty_group_help(hl, topic, group))
        raise typer.Exit(NOTHING)
    outcome = "acked" if ack else "not acked: the group will read them again"
    out.note(f"{counted(reader.printed, 'row')} {outcome}", "dim")


class RowPrinter:
    """Prints rows of a subscription, up to a limit."""

    def __init__(self, out: Output, limit: int | None, ack: bool) -> None:
        self._out, self._limit, self._ack = out, limit, ack
        self.printed = 0

    async def run(self, subscription: Subscription, wait: float | None) -> None:
        rows = aiter(subscription)
        while self._limit is None or self.printed < self._limit:
            try:
                async with asyncio.timeout(wait):
                    batch = await anext(rows, None)
            except TimeoutError:
                return
            if batch is None:
                return
            await self._print(subscription, batch)
            if not self._ack and self.printed >= OUTSTANDING_MAX:
                return  # no more rows arrive while these are outstanding

    async def _print(self, subscription: Subscription, batch: StreamBatch) -> None:
        left = len(batch) if self._limit is None else min(len(batch), self._limit - self.printed)
        print_stream_rows(self._out, batch.messages()[:left])
        sys.stdout.flush()
        self.printed += left
        if self._ack:
            await subscription.ack({batch.partition: batch.offsets[:left].tolist()})


async def _empty_group_help(hl: Broker, topic: str, group: str) -> str:
    offsets = await hl.group_offsets(topic, group)
    lag = sum(o.lag for o in offsets)
    text = f"no row arrived for group {bold(group)} of {escape(topic)}"
    if not lag:
        return f"{text}: it has read everything"
    readers = sorted({o.member for o in offsets if o.member is not None})
    others = f"; read by {', '.join(map(member_name, readers))}" if readers else ""
    return f"{text} ({counted(lag, 'row')} behind{others}; wait longer with --wait 1m)"


def member_name(name: str) -> str:
    r"""Return a member's name as markup. Members choose their names, which must not move the cursor.

    >>> member_name("m\x1b[2J[red]")
    'm\\x1b[2J\\[red]'
    """
    return escape(harmless(name).plain)
