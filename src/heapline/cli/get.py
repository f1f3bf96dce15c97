"""`heapline get TOPIC ID`: all that is known of one message."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from heapline.broker import Broker
from heapline.cli.connection import over_network
from heapline.cli.messages import JsonOption, TopicArgument, message_facts, print_infos
from heapline.cli.present import facts_table, make_console


@over_network
async def get(
    hl: Broker, topic: TopicArgument,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="The message's id, as put and peek show it.")],
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """All that is known of one message, whatever its state; also of one that has gone lately.

    Example:  [cyan]heapline get jobs 01JGXV0Z000000000000000000[/cyan]
    """
    info = await hl.get(topic, message_id)
    if as_json:
        print_infos([info])
    else:
        make_console().print(facts_table(escape(info.topic), message_facts(info)))
