"""`heapline assign`: looking at a crowd of workers that meet in NATS. It reads, and writes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from heapline.assign.kv import KV
    from heapline.assign.overview import Look, Overview

CONNECT_WITHIN = 5.0
POLL = 1.0  # seconds between two looks when nothing is heard
CALM = 0.1  # seconds in which what is heard becomes one look
HELP = """Crowds of workers that share partitions (heapline.assign).

Example:  [cyan]heapline assign watch --nats nats://127.0.0.1:4222[/cyan]
"""
app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=HELP)


@app.callback()
def assign() -> None:
    """One command in a group stays a command of the group."""


@app.command()
def watch(
    nats: Annotated[
        str, typer.Option(envvar="HEAPLINE_NATS_URL", show_envvar=True, help="A server's URL, or several with commas.")
    ] = "nats://127.0.0.1:4222",
    bucket: Annotated[str, typer.Option(help="The bucket that the crowd meets in.")] = "heapline-assign",
    once: Annotated[bool, typer.Option("--once", help="Show the crowd as it is now, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for each change.")] = False,
) -> None:
    """Show a crowd live: workers, leader, who holds what, and what moves. Ends with Ctrl-C.

    Example:  [cyan]heapline assign watch --nats nats://127.0.0.1:4222 --once --json[/cyan]

    What is shown may be a few seconds old: it is for people, not for programs that decide.
    """
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(nats.split(","), bucket, once, as_json))


async def _watch(servers: list[str], bucket: str, once: bool, as_json: bool) -> None:
    from heapline.assign.nats_kv import NatsKV
    from heapline.cli.crowd_view import JsonLines, LiveScreen, PlainLines, Shown
    from heapline.cli.present import make_console

    console = make_console()
    shown: Shown = PlainLines(console, bucket)
    if as_json:
        shown = JsonLines()
    elif console.is_terminal and not once:
        shown = LiveScreen(console, bucket, time.monotonic)
    async with await NatsKV.connect(servers, bucket=bucket, create=False, connect_within=CONNECT_WITHIN) as kv:
        with shown:
            async with contextlib.aclosing(_looks(kv)) as looks:
                async for look in looks:
                    shown.show(look)
                    if once and look.seen is not None:
                        return


async def _looks(kv: KV) -> AsyncGenerator[Look, None]:
    """The crowd whenever something may have changed, and at least every second."""
    from heapline.assign.errors import ConnectionLost
    from heapline.assign.overview import Look, moves, overview

    heard = asyncio.Event()
    listening = asyncio.create_task(_listen(kv, heard))
    before: Overview | None = None
    try:
        while True:
            heard.clear()
            try:
                seen = overview(await kv.entries(""))
            except ConnectionLost as error:
                yield Look(None, [], error.detail)
            else:
                yield Look(seen, [] if before is None else moves(before, seen))
                before = seen
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL):
                    await heard.wait()
            await asyncio.sleep(CALM)
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def _listen(kv: KV, heard: asyncio.Event) -> None:
    from heapline.assign.errors import ConnectionLost

    while True:
        with contextlib.suppress(ConnectionLost):
            async with contextlib.aclosing(kv.watch("")) as events:
                async for _ in events:
                    heard.set()
        await asyncio.sleep(POLL)
