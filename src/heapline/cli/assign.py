"""`heapline assign`: looking at a crowd of workers that meet in NATS. It reads, and writes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from heapline.assign.kv import KV
    from heapline.assign.overview import Look, Overview

CONNECT_WITHIN = 5.0
POLL = 1.0  # seconds between two looks when nothing is heard
CANCEL_AGAIN = 2.0  # seconds until what was cancelled and goes on is cancelled again
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
    asyncio.run(_until_stopped(_watch(nats.split(","), bucket, once, as_json)))


async def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Ctrl-C ends it, also if a library on the way swallows a cancellation: then it is cancelled again."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    while not working.done():
        working.cancel()
        await asyncio.wait({working}, timeout=CANCEL_AGAIN)
    if not working.cancelled():
        working.result()


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
        while not listening.done():
            listening.cancel()
            await asyncio.wait({listening}, timeout=CANCEL_AGAIN)


async def _listen(kv: KV, heard: asyncio.Event) -> None:
    from heapline.assign.errors import ConnectionLost

    while True:
        with contextlib.suppress(ConnectionLost):
            async with contextlib.aclosing(kv.watch("")) as events:
                async for _ in events:
                    heard.set()
        await asyncio.sleep(POLL)
