"""`heapline peek TOPIC`: look at the next messages, and change nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from heapline.broker import Broker
from heapline.cli.connection import over_network
from heapline.cli.messages import JsonOption, TopicArgument, print_infos, show_messages
from heapline.cli.nothing import why_nothing
from heapline.cli.present import make_console


@over_network
async def peek(
    hl: Broker, topic: TopicArgument,
    limit: Annotated[int, typer.Option("--limit", "-n", help="At most so many.")] = 10,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Look at the messages that pops would get next, best first. Nothing is leased and nothing changes.

    Example:  [cyan]heapline peek jobs -n 3[/cyan]
    """
    infos = await hl.peek(topic, limit)
    if as_json:
        print_infos(infos)
    elif infos:
        show_messages(make_console(), infos)
    else:
        make_console().print(await why_nothing(hl, topic))
