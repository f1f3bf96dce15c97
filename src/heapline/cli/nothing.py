"""What to say when a topic has nothing to give: that it is empty, or where its messages are."""

from __future__ import annotations

from rich.markup import escape

from heapline.broker import Broker
from heapline.cli.present import count
from heapline.errors import HeaplineError


async def why_nothing(hl: Broker, topic: str) -> str:
    text = f"nothing is ready in [bold]{escape(topic)}[/bold]"
    try:
        stats = await hl.stats(topic)
    except HeaplineError:
        return text  # whoever may not know is told the less
    if stats.paused:
        text += "; the topic is [yellow]paused[/yellow]"
    elsewhere = {"ready": stats.ready, "delayed": stats.delayed, "leased": stats.leased, "dead": stats.dead}
    held = ", ".join(f"{count(number)} {state}" for state, number in elsewhere.items() if number)
    if not held:
        return f"{text}: it is empty"
    return f"{text} ({held})"
