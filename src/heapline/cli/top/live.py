"""The live view: looks are taken again and again, keys change what is shown, and both draw the same frame.

A server that does not answer is said to be lost; what was known of it stays on the screen, and looks go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from heapline.cli.top.detail import detail_frame
from heapline.cli.top.looking import look
from heapline.cli.top.model import Watch
from heapline.cli.top.screen import Screen
from heapline.cli.top.terminal import reading_keys
from heapline.cli.top.view import drawable, list_frame
from heapline.errors import HeaplineError, TopicNotFound, UnavailableError


class LiveView:
    def __init__(self, hl: Any, screen: Screen, console: Console) -> None:
        self._hl, self._screen, self._console = hl, screen, console
        self._watch = Watch()
        self._alone = screen.topic  # only this one is looked at, as long as nobody asks for more
        self._ended = asyncio.Event()
        self._live: Live | None = None

    async def run(self) -> None:
        await self._look()  # a server that is not there at first is an error
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sign, self._ended.set)
        loop.add_signal_handler(signal.SIGWINCH, self.draw)
        live = Live(console=self._console, screen=True, auto_refresh=False, transient=True)
        with live as self._live, reading_keys(self.press):
            self.draw()
            looking = asyncio.ensure_future(self._look_on())
            ending = asyncio.ensure_future(self._ended.wait())
            try:
                await asyncio.wait((looking, ending), return_when=asyncio.FIRST_COMPLETED)
            finally:
                ending.cancel()
                looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking

    def press(self, key: str) -> None:
        rows = self._watch.rows(self._screen.sort, self._screen.reverse, self._screen.only)
        self._screen.press(key, [row.name for row in rows])
        if self._screen.topic is None:
            self._alone = None
        if self._screen.wants_end:
            self._ended.set()
        self.draw()

    async def _look_on(self) -> None:
        begun, took = time.monotonic(), 0.0
        while True:
            # Many topics make a look long: watching must not take more than half of anybody's time.
            begun = max(begun + self._screen.interval, time.monotonic() + took)
            await asyncio.sleep(max(0.0, begun - time.monotonic()))
            if not self._screen.is_held:
                await self._look_or_tell()
            took = time.monotonic() - begun
            self.draw()

    async def _look_or_tell(self) -> None:
        try:
            await self._look()
        except TopicNotFound:
            self._watch.topics.clear()
            self._screen.lost = ""
        except HeaplineError as error:
            self._screen.lost_at = self._screen.lost_at if self._screen.lost else time.monotonic()
            self._screen.lost = "connection lost" if isinstance(error, UnavailableError) else type(error).__name__
            self._watch.miss()
        else:
            self._screen.lost = ""

    async def _look(self) -> None:
        self._watch.add(await look(self._hl, self._alone))

    def draw(self) -> None:
        if self._live is not None:
            self._live.update(Group(*self.frame()), refresh=True)

    def frame(self) -> list[Text]:
        width, height = self._console.size
        make = list_frame if self._screen.topic is None else detail_frame
        lines = make(self._watch, self._screen, width, height, time.strftime("%H:%M:%S"), time.monotonic())
        return drawable(lines, self._console)


async def watch_live(hl: Any, screen: Screen) -> None:
    await LiveView(hl, screen, Console(highlight=False)).run()
