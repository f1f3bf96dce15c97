"""Where an app's broker is, and in which event loop it lives.

A server is connected to once an event loop, a directory is opened once a process, and a broker that was given is used
as it is. Code without a loop gets one: a thread of the app's own, which ends with the process, for what was answered
is durable. After a fork nothing of the parent's is touched.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from heapline.broker import Broker
from heapline.client.connecting import TARGET, URL, connect, connect_from_env
from heapline.errors import BadRequest

T = TypeVar("T")
Target = str | os.PathLike[str] | Broker | None
Loop = asyncio.AbstractEventLoop
#: Clients of a process that forked. They are kept because ending one would disturb the parent's connection.
_of_parents: list[Any] = []


class Home:
    def __init__(self, target: Target = None, api_key: str | None = None) -> None:
        if not (target is None or isinstance(target, str | os.PathLike) or hasattr(target, "enqueue_batch")):
            raise TypeError(f"an App's target is a server, a directory or a broker, not {target!r}")
        if api_key is not None and (not isinstance(target, str) or directory_of(target) is not None):
            raise ValueError('api_key goes with the server that it is for: App("heaplines://host", api_key=…)')
        self.given = None if target is None or isinstance(target, str | os.PathLike) else target
        self.directory = directory_of(target)
        self._url = target if isinstance(target, str) and self.directory is None else None
        self._api_key = api_key
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._thread_loop: Loop | None = None  # of our own thread
        self._by_loop: weakref.WeakKeyDictionary[Loop, asyncio.Future[Any]] = weakref.WeakKeyDictionary()
        self._owner: Loop | None = None  # the one loop in which the directory, or the given broker, lives

    def _check_fork(self) -> None:
        if os.getpid() != self._pid:
            _of_parents.append(self._by_loop)
            self._forget()  # sockets, locks and threads are the parent's

    def __str__(self) -> str:
        if self.given is not None:
            return type(self.given).__name__
        return str(self.directory or self._url or os.environ.get(URL, TARGET))

    # -- async -----------------------------------------------------------------------------------------------------

    async def broker(self) -> Broker:
        """For the loop that runs here."""
        self._check_fork()
        loop = asyncio.get_running_loop()
        if self.given is not None:
            if self._owner is None:
                self._owner = loop
            return self.given
        if self.directory is None or self._owner is loop:
            return await self._opened(loop)  # type: ignore[no-any-return]
        owner = self._owner_or_thread()
        return await self._opened(loop) if owner is loop else Elsewhere(self, owner)

    async def open_here(self) -> Any:
        """The same, and a directory that nobody has opened yet lives in this loop from now on."""
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
                del self._by_loop[loop]  # the next one tries again
            raise

    def _drop_those_of_closed_loops(self) -> None:
        """What was opened holds its loop, so none would ever go by itself; Django may make a loop a request."""
        for loop in [ref() for ref in self._by_loop.keyrefs()]:
            if loop is not None and loop.is_closed():
                del self._by_loop[loop]

    async def _open(self) -> Any:
        if self.directory is not None:
            from heapline.engine import open as open_directory

            return await open_directory(self.directory).__aenter__()
        return await make_client(self._url, self._api_key).__aenter__()

    def is_open_here(self) -> bool:
        self._check_fork()
        return asyncio.get_running_loop() in self._by_loop

    async def close(self) -> None:
        """What this loop has opened, and our own thread. A broker that was given is left to the giver."""
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
            raise RuntimeError(f"{what}_sync would block the event loop that runs here: use `await {what}(…)`")
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
    """A broker that lives in another loop: its coroutines run there, and are waited for here."""

    def __init__(self, home: Home, loop: Loop) -> None:
        self._home = home
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("read_log", "replay"):
            raise AttributeError(f"{name!r} of a broker that lives in another event loop")

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
    """A client for a server; None: the one that the environment names."""
    if find_spec("grpc") is None:
        raise BadRequest("a server is reached over gRPC, which is not installed: pip install 'heapline[client]'")
    return connect_from_env() if url is None else connect(url, api_key=api_key)


def _start_thread() -> Loop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="heapline-app", daemon=True).start()
    return loop
