"""`heapline top`: which server, how often, and in which form: live, once, or as lines of JSON."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer
from rich.console import Console

from heapline.broker import Broker
from heapline.cli.advice import advised
from heapline.cli.connection import CaOption, KeyFileOption, Settings, ToOption, connect, settle
from heapline.cli.present import make_console
from heapline.cli.top.looking import look
from heapline.cli.top.model import SORTS, Watch
from heapline.cli.top.once import lines_of
from heapline.cli.top.screen import Screen
from heapline.cli.top.telling import as_json, trouble_as_json
from heapline.cli.top.view import drawable
from heapline.client.connecting import TARGET
from heapline.config import parse_topic
from heapline.errors import HeaplineError, UnavailableError

CALL_SECONDS = 3.0  # that a call may take; then the server counts as lost, and is asked again


def top(
    topic: Annotated[str | None, typer.Argument(help="Look into this one: its partitions, and what waits.")] = None,
    interval: Annotated[float, typer.Option("--interval", "-i", help="Seconds between looks.", min=0.05)] = 1.0,
    sort: Annotated[str, typer.Option(help=f"By what: {', '.join(SORTS)}.")] = "ready",
    only: Annotated[str, typer.Option("--filter", "-f", help="Only topics with this in their names.")] = "",
    once: Annotated[bool, typer.Option("--once", help="Two looks one interval apart, shown once.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a look, until stopped or --once.")] = False,
    to: ToOption = TARGET,
    key_file: KeyFileOption = None,
    ca: CaOption = None,
) -> None:
    """Watch a server: depths, rates, waits, leases, and what falls due soon.

    Example:  [cyan]heapline top[/cyan]

    One topic with its partitions:  [cyan]heapline top jobs[/cyan]

    For a script:  [cyan]heapline top --once --json[/cyan]

    Keys: [bold]q[/bold] quit, [bold]s[/bold] sort, [bold]r[/bold] reverse, [bold]/[/bold] filter, arrows and Enter to
    look into a topic, Esc back, [bold]p[/bold] hold. If the server goes away, the view
    stays and goes on when it is back. Without a terminal, or on a dumb one,
    it shows one look, as with [bold]--once[/bold].
    """
    if sort not in SORTS:
        raise typer.BadParameter(f"{sort!r} is none of {', '.join(SORTS)}", param_hint="--sort")
    if topic is not None:
        namespace, name = parse_topic(topic)
        topic = name if namespace == "default" else topic
    settings = settle(to, key_file, ca, CALL_SECONDS)
    screen = Screen(settings.where.servers, interval, sort, only=only, topic=topic)
    is_live = not (once or json) and can_be_drawn_on(make_console())
    asyncio.run(_run(settings, screen, is_live=is_live, as_lines=json, once=once))


def can_be_drawn_on(console: Console) -> bool:
    """A dumb terminal (TERM=dumb, as in an editor's shell) cannot move its cursor: a live view would show nothing."""
    return console.is_terminal and not console.is_dumb_terminal


async def _run(settings: Settings, screen: Screen, *, is_live: bool, as_lines: bool, once: bool) -> None:
    async with connect(settings) as hl:
        try:
            if is_live:
                from heapline.cli.top.live import watch_live

                await watch_live(hl, screen)
            elif as_lines:
                await _tell(hl, screen, once)
            else:
                await _show_once(hl, screen)
        except HeaplineError as error:
            raise await advised(error, hl, settings.where) from None


async def _two_looks(hl: Broker, screen: Screen) -> Watch:
    watch = Watch()
    watch.add(await look(hl, screen.topic))
    await asyncio.sleep(screen.interval)
    watch.add(await look(hl, screen.topic))
    return watch


async def _show_once(hl: Broker, screen: Screen) -> None:
    watch = await _two_looks(hl, screen)
    console = make_console()
    for line in drawable(lines_of(watch, screen, console.width), console):
        console.print(line)


async def _tell(hl: Any, screen: Screen, once: bool) -> None:
    """Lines of JSON. One that could not be had is told as one too, and the next look is tried."""
    if once:
        _say(await _two_looks(hl, screen), screen)
        return
    watch = Watch()
    while True:
        try:
            watch.add(await look(hl, screen.topic))
            _say(watch, screen)
        except UnavailableError as error:
            if not watch.looks:
                raise
            watch.miss()
            print(trouble_as_json(screen.server, error), flush=True)
        await asyncio.sleep(screen.interval)


def _say(watch: Watch, screen: Screen) -> None:
    rows = watch.rows(screen.sort, screen.reverse, screen.only)
    print(as_json(watch, rows, screen.server, in_full=screen.topic is not None), flush=True)
