"""Changes of open pages, as server-sent events.

A *view* is one place as one set of rights sees it. While someone watches a view, it is read and rendered at most twice
per second, and more rarely if that takes long: all together may use about a twenty-fifth of a core. Statistics that
views share are read apart from that (topic_rows.py), for another eightieth at most. Each rendering is compared with the
one before, part by part, and all who watch receive the same bytes. A watcher that does not keep up receives what has
changed since its last event, so nothing queues up for it.

One stream may carry several views: the tabs of a browser share one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from heapline.contract.errors import HeaplineError, ResourceExhausted, Unauthenticated
from heapline.dashboard.caller import Caller
from heapline.dashboard.page import PageKind, Place
from heapline.dashboard.render import Parts
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks
from heapline.server.auth.principals import Principal
from heapline.wire import error_codes

PERIOD = 0.5  # seconds between two renderings of a view, at least
SHARE = 25.0  # and this many times as long as one takes the processor, for each view that is open
PERIOD_MAX = 15.0
SIGNED_OUT = b"event: signed-out\ndata: {}\n\n"
CHECK = 1.0  # seconds without an event after which a stream checks whether it must end
PING = 15  # such checks after which a comment is sent, so that proxies keep the connection
VIEWS_MAX = 12  # of one stream
OPEN_MAX = 1000  # views of all streams
log = Log("heapline.dashboard")
Render = Callable[[PageKind, Place, Caller, dict[str, Any]], Parts]


class View:
    def __init__(self, kind: PageKind, place: Place, render: Render) -> None:
        self.kind, self.place, self._render = kind, place, render
        self.watchers: dict[Watcher, Caller] = {}  # all have the same rights; the first one reads for all
        self.version = 0
        self._parts: dict[str, tuple[int, str]] = {}  # the version in which each part last changed
        self._order: dict[str, list[str]] = {}
        self._error = ""
        self._latest = b""  # from the version before to the current one
        self.poked = asyncio.Event()

    async def run(self, open_views: Callable[[], int] = lambda: 1, shared: Callable[[], float] = lambda: 0.0) -> None:
        while self.watchers:
            began = time.thread_time() - shared()
            await self._refresh()
            took = (
                time.thread_time() - shared() - began
            )  # with what else the event loop did: a busy server refreshes more rarely
            self.poked.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.poked.wait(), pause(took, open_views()))
                # Several changes that come together are one; a caller that makes many cannot use up the processor.
                await asyncio.sleep(max(0.05, pause(took, open_views()) / 2 - PERIOD))

    async def _read(self, caller: Caller) -> Parts:
        return self._render(self.kind, self.place, caller, await self.kind.load(caller, self.place))

    async def _refresh(self) -> None:
        error, parts = "", None
        rejected: set[Principal] = set()
        for watcher, caller in list(self.watchers.items()):
            if caller.principal in rejected:
                continue
            try:
                parts, error = await self._read(caller), ""
            except (Unauthenticated, ResourceExhausted) as problem:
                # Of this caller alone. Its stream may not end for long, if its client does not read: another one reads.
                rejected.add(caller.principal)
                error = error_codes.advise(error_codes.describe(problem), "page")
                if watcher in self.watchers:
                    self.watchers[watcher] = self.watchers.pop(watcher)
                continue
            except HeaplineError as problem:
                error = error_codes.advise(error_codes.describe(problem), "page")
            except Exception:
                log.exception("page not rendered; will retry", place=self.place.path)
                error = error_codes.INTERNAL_TEXT
            break
        if self._take(parts, error):
            for watcher in self.watchers:
                watcher.changed.set()

    def _take(self, parts: Parts | None, error: str) -> bool:
        """Replace the parts by those of a new rendering. Return whether anything has changed."""
        version = self.version + 1
        changed = error != self._error
        self._error = error
        if parts is not None:
            old = self._parts
            self._parts = {}
            for name, html in parts.html.items():
                before = old.get(name)
                is_same = before is not None and before[1] == html
                self._parts[name] = before if before is not None and is_same else (version, html)
                changed |= not is_same
            changed |= self._order != parts.order
            self._order = parts.order
        if changed:
            self.version = version
            self._latest = self._encode(version - 1)
        return changed

    def since(self, version: int) -> bytes:
        """Return an event with the parts that have changed since a version."""
        return self._latest if version == self.version - 1 else self._encode(version)

    def _encode(self, version: int) -> bytes:
        changed = {name: html for name, (at, html) in self._parts.items() if at > version}
        data = {"view": self.place.key, "parts": changed, "order": self._order, "error": self._error}
        return b"data: " + msgspec.json.encode(data) + b"\n\n"


def pause(took: float, open_views: int) -> float:
    """Return the seconds until the next rendering of a view, which took so long, with so many views open."""
    return min(PERIOD_MAX, max(PERIOD, took * SHARE * open_views))


class Watcher:
    """One open stream."""

    def __init__(self, views: Sequence[View]) -> None:
        self._sent = dict.fromkeys(views, 0)
        self.changed = asyncio.Event()

    async def events(self, last_words: Callable[[], bytes | None]) -> AsyncIterator[bytes]:
        """Yield events until `last_words` returns one, which is the last."""
        yield b": hello\n\n"
        quiet = 0
        while True:
            for view, version in self._sent.items():
                if view.version > version:
                    self._sent[view] = view.version
                    yield view.since(version)
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), CHECK)
                quiet = 0
            except TimeoutError:
                quiet += 1
                if quiet % PING == 0:
                    yield b": still here\n\n"
            if (last := last_words()) is not None:
                yield last
                return


class Views:
    """The views that are open now."""

    def __init__(self, render: Render, shared: Callable[[], float] = lambda: 0.0) -> None:
        self._render, self._shared = render, shared
        self._views: dict[tuple[Any, ...], View] = {}
        self._tasks = OwnedTasks()

    @contextlib.contextmanager
    def watch(self, places: Sequence[tuple[PageKind, Place]], caller: Caller) -> Any:
        """Open the views of these places. Yield the watcher of them."""
        views = [self._open(kind, place, caller) for kind, place in places]
        watcher = Watcher(views)
        for view in views:
            view.watchers[watcher] = caller
        try:
            yield watcher
        finally:
            for view in views:
                view.watchers.pop(watcher, None)

    def _open(self, kind: PageKind, place: Place, caller: Caller) -> View:
        key = (place.key, caller.principal.scopes)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= OPEN_MAX:
                raise ResourceExhausted("different pages that are open", OPEN_MAX)
            view = self._views[key] = View(kind, place, self._render)
            self._tasks.spawn(self._run(key, view))
        return view

    async def _run(self, key: tuple[Any, ...], view: View) -> None:
        await asyncio.sleep(0)  # the first watcher is not added yet
        try:
            await view.run(self._views.__len__, self._shared)
        finally:
            if self._views.get(key) is view:
                del self._views[key]

    def poke(self) -> None:
        """Read all views again soon, because something was changed."""
        for view in self._views.values():
            view.poked.set()
