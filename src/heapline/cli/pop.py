"""`heapline pop TOPIC`: lease messages and show them; with --ack they are done then.

They are shown before they are acked: whatever goes wrong between, a message is seen twice rather than never.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from heapline.broker import Broker
from heapline.cli.connection import over_network
from heapline.cli.messages import JsonOption, TopicArgument, clock, print_popped, show_popped
from heapline.cli.nothing import why_nothing
from heapline.cli.present import count, make_console
from heapline.cli.units import duration
from heapline.model import Message

NOTHING = 3  # exit code
AT_ONCE = 1000  # messages of one call


@over_network
async def pop(
    hl: Broker, topic: TopicArgument,
    max_messages: Annotated[int, typer.Option("--max", "-n", min=1, help="At most so many.")] = 1,
    ack: Annotated[bool, typer.Option("--ack", help="Done: ack them once they are shown, so they are gone.")] = False,
    wait: Annotated[
        float, typer.Option("--wait", "-w", metavar="DURATION", parser=duration, help="Wait so long for the first one.")
    ] = "0s",  # type: ignore[assignment]
    visibility: Annotated[
        float | None, typer.Option(
            "--visibility", metavar="DURATION", parser=duration,
            help="How long they are leased; the topic's visibility_default if not given.",
        ),
    ] = None,
    holder: Annotated[
        str | None, typer.Option("--holder", help="Who holds the leases; who you are to the server if not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Take the best messages that are due.

    Example:  [cyan]heapline pop jobs --ack[/cyan]

    Without --ack they are only leased: nobody else gets them until the lease
    ends; then they come back by themselves, and it counts as a delivery.
    To look without taking, use [cyan]heapline peek[/cyan].

    Exit code 3 if nothing was there:  [cyan]while heapline pop jobs --ack --json >> done.jsonl; do :; done[/cyan]
    """
    console, taken = make_console(), 0
    last: Message | None = None
    while taken < max_messages:
        wanted = min(max_messages - taken, AT_ONCE)
        messages = await hl.pop(topic, wanted, visibility=visibility, wait=0.0 if taken else wait, holder=holder)
        if not messages:
            break
        try:
            if as_json:
                print_popped(messages)
            else:
                show_popped(console, messages)
            sys.stdout.flush()
        except (OSError, SystemExit):  # a pipe that broke, a full disk: nobody has them, so others may
            await hl.release(messages)
            raise
        if ack:
            await hl.ack(messages)
        taken, last = taken + len(messages), messages[-1]
    note = make_console(stderr=True)
    if last is None:
        if not as_json:
            note.print(await why_nothing(hl, topic))
        raise typer.Exit(NOTHING)
    if not as_json:
        note.print(f"[dim]{_afterwards(taken, ack, last)}[/dim]")


def _afterwards(taken: int, ack: bool, last: Message) -> str:
    them = "1 message" if taken == 1 else f"{count(taken)} messages"
    if ack:
        return f"{them} acked: gone from the topic"
    comes = "it comes" if taken == 1 else "they come"
    return (
        f"{them} leased until {clock(last.deadline)}, not acked: then {comes} back. --ack removes what is shown; "
        "heapline peek looks without taking"
    )
