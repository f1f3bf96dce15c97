"""`heapline explain`: why messages are served in their order, and why one waits."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from heapline.cli.connection import TopicArgument, over_network
from heapline.cli.message_view import empty_topic_help
from heapline.cli.output import Output, columns_table, count, harmless
from heapline.contract.broker import Broker
from heapline.contract.inspection import ExplainedMessage
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
