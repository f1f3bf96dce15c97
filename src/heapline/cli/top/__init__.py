"""`heapline top`: watch the topics of a server, live, once, or as JSON lines.

If the server does not answer, the live view says so, keeps the last known numbers, and continues when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Meta
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from heapline.cli.connection import Settings, connected, settle
from heapline.cli.options import takes
from heapline.cli.output import make_console, print_json, timestamp
from heapline.cli.top.keyboard import Screen, reading_keys
from heapline.cli.top.sampler import SORTS, TopicWatch, Watch, sample
from heapline.cli.top.view import detail_frame, list_frame, plain_lines, translated
from heapline.contract.config import parse_topic
from heapline.contract.errors import HeaplineError, TopicNotFound, UnavailableError

STATS = ("ready", "delayed", "leased", "dead", "paused", "oldest_ready_age", "lease_ends_in")
LOG_STATS = ("journal_bytes", "memory_bytes")  # null on a broker without the feature "log"
LATENCIES = ("enqueue", "pop", "commit")


@takes(server=partial(settle, timeout=3.0))
def top(
    server: Settings,
    topic: Annotated[str | None, typer.Argument(help="Show only this topic, with its partitions.")] = None,
    interval: Annotated[float, "-i", "Seconds between refreshes.", Meta(ge=0.05)] = 1.0,
    sort: Annotated[str, f"Order of the topics: {', '.join(SORTS)}."] = "ready",
    only: Annotated[str, "--filter -f", "Only topics whose names contain this text."] = "",
    once: Annotated[bool, "Measure for one interval, print the result, and exit."] = False,
    json: Annotated[bool, "Print one JSON object per refresh, until interrupted. With --once, print one."] = False,
) -> None:
    """Watch the topics of a server: depths, rates, waits and leases.

    Example:  [cyan]heapline top[/cyan]

    One topic with its partitions:  [cyan]heapline top jobs[/cyan]

    For a script:  [cyan]heapline top --once --json[/cyan]

    Keys: [bold]q[/bold] quit, [bold]s[/bold] sort, [bold]r[/bold] reverse, [bold]/[/bold] filter, arrows and Enter to
    open a topic, Esc back, [bold]p[/bold] pause the view. Without a terminal, or on a
    dumb one, it prints once, as with [bold]--once[/bold]. A call that takes longer than --timeout
    counts as a lost connection.
    """
    if sort not in SORTS:
        raise typer.BadParameter(f"{sort!r} is not one of {', '.join(SORTS)}", param_hint="--sort")
    if topic is not None:
        namespace, name = parse_topic(topic)
        topic = name if namespace == "default" else topic
    screen = Screen(server.servers, interval, sort, only=only, topic=topic)
    is_live = not (once or json) and is_drawable(make_console())
    asyncio.run(_run(server, screen, is_live=is_live, as_json=json, once=once))


def is_drawable(console: Console) -> bool:
    """Return whether the terminal can move its cursor. A dumb one (TERM=dumb, as in an editor's shell) cannot."""
    return console.is_terminal and not console.is_dumb_terminal


async def _run(settings: Settings, screen: Screen, *, is_live: bool, as_json: bool, once: bool) -> None:
    async with connected(settings) as hl:
        if is_live:
            await LiveView(hl, screen, Console(highlight=False)).run()
        elif as_json:
            await print_json_lines(hl, screen, once)
        else:
            console = make_console()
            for line in translated(plain_lines(await _two_samples(hl, screen), screen, console.width), console):
                console.print(line)


async def _two_samples(hl: Any, screen: Screen) -> Watch:
    watch = Watch()
    watch.add(await sample(hl, screen.topic))
    await asyncio.sleep(screen.interval)
    watch.add(await sample(hl, screen.topic))
    return watch


# -- JSON --------------------------------------------------------------------------------------------------------------


async def print_json_lines(hl: Any, screen: Screen, once: bool) -> None:
    """Print one object per refresh. A refresh that failed is one too, and the next one is tried."""
    if once:
        _print_watch(await _two_samples(hl, screen), screen)
        return
    watch = Watch()
    while True:
        try:
            watch.add(await sample(hl, screen.topic))
            _print_watch(watch, screen)
        except UnavailableError as error:
            if not watch.samples:
                raise
            watch.miss()
            _print({"at": _now(), "server": screen.server, "error": type(error).__name__, "detail": str(error)})
        await asyncio.sleep(screen.interval)


def _print_watch(watch: Watch, screen: Screen) -> None:
    rows = watch.rows(screen.sort, screen.reverse, screen.only)
    _print(watch_json(watch, rows, screen.server, in_full=screen.topic is not None))


def _print(line: dict[str, Any]) -> None:
    print_json(line)
    sys.stdout.flush()


def watch_json(watch: Watch, rows: Sequence[TopicWatch], server: str, *, in_full: bool = False) -> dict[str, Any]:
    topics = [_topic_json(row, in_full) for row in rows]
    return {"at": _now(), "server": server, "totals": watch.totals()._asdict(), "topics": topics}


def _topic_json(topic: TopicWatch, in_full: bool) -> dict[str, Any]:
    stats = topic.stats
    if topic.trouble or stats is None:
        return {"topic": topic.name, "trouble": topic.trouble}
    fields: dict[str, Any] = {"topic": topic.name, **{name: getattr(stats, name) for name in STATS}}
    fields |= {name: getattr(stats.log, name, None) for name in LOG_STATS}
    fields["due_10s"], fields["due_60s"] = topic.due_within(10), topic.due_within(60)
    fields["rates"] = topic.rates and topic.rates._asdict()  # messages per second; null after the first sample
    fields["latency_ms"] = {call: topic.latency(call)._asdict() for call in LATENCIES}
    if in_full:
        fields["partitions"] = [
            {**msgspec.to_builtins(part), "leased_rate": topic.served.get(part.partition)} for part in stats.partitions
        ]
        fields["depth_by_priority"], fields["due_histogram"] = stats.depth_by_priority, stats.due_histogram
    return fields


def _now() -> str:
    return timestamp(time.time_ns() // 1_000_000)


# -- live --------------------------------------------------------------------------------------------------------------


class LiveView:
    """Takes samples at an interval and draws a frame after each sample and each key."""

    def __init__(self, hl: Any, screen: Screen, console: Console) -> None:
        self._hl, self._screen, self._console = hl, screen, console
        self._watch = Watch()
        self._only_topic = screen.topic  # sample only this topic until the list of all topics is opened
        self._ended = asyncio.Event()
        self._live: Live | None = None

    async def run(self) -> None:
        await self._sample()  # a server that does not answer at first is an error
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sign, self._ended.set)
        loop.add_signal_handler(signal.SIGWINCH, self.draw)
        live = Live(console=self._console, screen=True, auto_refresh=False, transient=True)
        with live as self._live, reading_keys(self.press):
            self.draw()
            sampling = asyncio.ensure_future(self._sample_repeatedly())
            ending = asyncio.ensure_future(self._ended.wait())
            try:
                await asyncio.wait((sampling, ending), return_when=asyncio.FIRST_COMPLETED)
            finally:
                ending.cancel()
                sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampling

    def press(self, key: str) -> None:
        rows = self._watch.rows(self._screen.sort, self._screen.reverse, self._screen.only)
        self._screen.press(key, [row.name for row in rows])
        if self._screen.topic is None:
            self._only_topic = None
        if self._screen.wants_end:
            self._ended.set()
        self.draw()

    async def _sample_repeatedly(self) -> None:
        start, took = time.monotonic(), 0.0
        while True:
            # With many topics a sample takes long. Sampling must not take more than half of the server's time.
            start = max(start + self._screen.interval, time.monotonic() + took)
            await asyncio.sleep(max(0.0, start - time.monotonic()))
            if not self._screen.is_held:
                await self.refresh()
            took = time.monotonic() - start
            self.draw()

    async def refresh(self) -> None:
        """Take a sample, or note why there is none."""
        try:
            await self._sample()
        except TopicNotFound:
            self._watch.topics.clear()
            self._screen.lost = ""
        except HeaplineError as error:
            self._screen.lost_at = self._screen.lost_at if self._screen.lost else time.monotonic()
            self._screen.lost = "connection lost" if isinstance(error, UnavailableError) else type(error).__name__
            self._watch.miss()
        else:
            self._screen.lost = ""

    async def _sample(self) -> None:
        self._watch.add(await sample(self._hl, self._only_topic))

    def draw(self) -> None:
        if self._live is not None:
            self._live.update(Group(*self.frame()), refresh=True)

    def frame(self) -> list[Text]:
        width, height = self._console.size
        make = list_frame if self._screen.topic is None else detail_frame
        lines = make(self._watch, self._screen, width, height, time.strftime("%H:%M:%S"), time.monotonic())
        return translated(lines, self._console)
