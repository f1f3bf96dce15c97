"""Bind an app to its broker, and the broker to an event loop.

A server has one client per event loop, a directory is opened once per process, and a broker that was given is used as
it is. Code without an event loop uses one in the app's own thread, which ends with the process, because everything
acknowledged is durable. After a fork, the child does not use the parent's connections.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from heapline.client.connect import TARGET, URL, connect, connect_from_env
from heapline.contract.broker import Broker

T = TypeVar("T")
Target = str | os.PathLike[str] | Broker | None
Loop = asyncio.AbstractEventLoop
#: Clients of a process that forked. They are kept, because closing one would disturb the parent's connection.
_of_parents: list[Any] = []


class Home:
    def __init__(self, target: Target = None, api_key: str | None = None) -> None:
        if not (target is None or isinstance(target, str | os.PathLike) or hasattr(target, "enqueue_batch")):
            raise TypeError(f"target of an App must be a server, a directory or a broker, got {target!r}")
        if api_key is not None and (not isinstance(target, str) or directory_of(target) is not None):
            raise ValueError('api_key needs the server that it is for; write App("heapline+tls://host", api_key=…)')
        self.given = None if target is None or isinstance(target, str | os.PathLike) else target
        self.directory = directory_of(target)
        self._url = target if isinstance(target, str) and self.directory is None else None
        self._api_key = api_key
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._thread_loop: Loop | None = None  # of the app's own thread
        self._by_loop: weakref.WeakKeyDictionary[Loop, asyncio.Future[Any]] = weakref.WeakKeyDictionary()
        self._owner: Loop | None = None  # the loop that uses the directory, or the given broker

    def _check_fork(self) -> None:
        if os.getpid() != self._pid:
            _of_parents.append(self._by_loop)
            self._forget()  # sockets, locks and threads belong to the parent

    def __str__(self) -> str:
        if self.given is not None:
            return type(self.given).__name__
        return str(self.directory or self._url or os.environ.get(URL, TARGET))

    # -- async -----------------------------------------------------------------------------------------------------

    async def broker(self) -> Broker:
        """Return the broker of the running event loop."""
        self._check_fork()
        loop = asyncio.get_running_loop()
        if self.given is not None:
            if self._owner is None:
                self._owner = loop
            return self.given
        if self.directory is None or self._owner is loop:
            return await self._opened(loop)  # type: ignore[no-any-return]
        owner = self._owner_or_thread()
        return await self._opened(loop) if owner is loop else Elsewhere(self, owner)  # type: ignore[return-value]

    async def open_here(self) -> Any:
        """Return the broker. A directory that is not open yet is opened in this event loop."""
        self._check_fork()
        with self._lock:
            if self._owner is None:
                self._owner = asyncio.get_running_loop()
        return await self.broker()

    async def _opened(self, loop: Loop) -> Any:
        opening = self._by_loop.get(loop)
        if opening is None:
            opening = asyncio.ensure_future(self._open())
            with self._lock:
                self._drop_those_of_closed_loops()
                self._by_loop[loop] = opening
        try:
            return await asyncio.shield(opening)
        except BaseException:
            if opening.done() and self._by_loop.get(loop) is opening and (opening.cancelled() or opening.exception()):
                del self._by_loop[loop]  # the next caller tries again
            raise

    def _drop_those_of_closed_loops(self) -> None:
        """Brokers refer to their loop, so none would be collected; Django may create a loop per request."""
        for loop in [ref() for ref in self._by_loop.keyrefs()]:
            if loop is not None and loop.is_closed():
                del self._by_loop[loop]

    async def _open(self) -> Any:
        if self.directory is not None:
            from heapline import open as open_directory

            return await open_directory(self.directory).__aenter__()
        return await make_client(self._url, self._api_key).__aenter__()

    def is_open_here(self) -> bool:
        self._check_fork()
        return asyncio.get_running_loop() in self._by_loop

    async def close(self) -> None:
        """Close the broker of this loop and of the app's own thread. A broker that was given stays open."""
        await self.close_here()
        if (loop := self._thread_loop) is not None and loop is not asyncio.get_running_loop():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.close_here(), loop))

    async def close_here(self) -> None:
        self._check_fork()
        loop = asyncio.get_running_loop()
        opening = self._by_loop.pop(loop, None)
        if self._owner is loop:
            self._owner = None
        if opening is not None:
            await (await opening).close()

    # -- without a loop --------------------------------------------------------------------------------------------

    def run_sync(self, make: Callable[[], Coroutine[Any, Any, T]], what: str) -> T:
        self._check_fork()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise RuntimeError(f"{what}_sync would block the running event loop; use `await {what}(…)`")
        return asyncio.run_coroutine_threadsafe(make(), self._owner_or_thread()).result()

    def _owner_or_thread(self) -> Loop:
        with self._lock:
            if self._owner is not None and self._owner.is_running():
                return self._owner
            if self._thread_loop is None:
                self._thread_loop = _start_thread()
            if self.directory is not None:
                self._owner = self._thread_loop
            return self._thread_loop


class Elsewhere:
    """A broker of another event loop: its coroutines run there, and this loop waits for them."""

    def __init__(self, home: Home, loop: Loop) -> None:
        self._home = home
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("read_log", "replay"):
            raise AttributeError(f"{name!r} cannot be used from another event loop than its broker's")

        async def there(args: Any, kwargs: Any) -> Any:
            return await getattr(await self._home._opened(self._loop), name)(*args, **kwargs)

        async def here(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(args, kwargs), self._loop))

        return here


def directory_of(target: Any) -> Path | None:
    """
    >>> directory_of("./data"), directory_of("localhost:7400"), directory_of("heapline://queue:7400")
    (PosixPath('data'), None, None)
    """
    if isinstance(target, os.PathLike):
        return Path(target)
    if not isinstance(target, str) or "://" in target:
        return None
    looks_so = target.startswith(".") or "/" in target or (":" not in target and Path(target).is_dir())
    return Path(target) if looks_so else None


def make_client(url: str | None, api_key: str | None = None) -> Any:
    """Return a client for a server, or for the one that the environment names if `url` is None."""
    return connect_from_env() if url is None else connect(url, api_key=api_key)


def _start_thread() -> Loop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="heapline-app", daemon=True).start()
    return loop
