"""The client for code that does not await: the same one, run by a thread of its own, used from any number of threads.

The thread starts with the first call. A forked child starts its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, ClassVar, TypeVar, cast

from heapline.client.consuming import PREFETCH, Consumption
from heapline.client.sdk import ConnectedBroker
from heapline.engine.sync import SyncBroker, SyncMessage
from heapline.errors import Closed
from heapline.model import Message

T = TypeVar("T")


class SyncClient(SyncBroker):
    """Made by `heapline.connect_sync`; use it with `with`, or as it is and `close` it."""

    _kind: ClassVar[type] = ConnectedBroker
    _broker: ConnectedBroker | None

    def __init__(self, client: ConnectedBroker) -> None:
        self._client = client
        self._broker = client
        self._loop = self._thread = None
        self._pid = os.getpid()
        self._lock, self._starting = threading.Lock(), threading.Lock()

    async def _open(self) -> ConnectedBroker:  # type: ignore[override]
        return await self._client.__aenter__()

    def __enter__(self) -> SyncClient:
        self._broker = self._client
        self._client.reopen()
        return self

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._pid != os.getpid():  # the thread stayed with the parent
            self._loop, self._thread, self._pid = None, None, os.getpid()
            self._lock, self._starting = threading.Lock(), threading.Lock()
        with self._starting:
            if self._broker is None:
                work.close()
                raise Closed
            if self._loop is None:
                self._start()
        return super()._run(work)

    def close(self) -> None:
        if self._pid != os.getpid():  # what there is to close is the parent's
            self._broker = None
            return
        with self._starting:
            broker, self._broker = self._broker, None
        if broker is not None and self._loop is not None:
            with contextlib.suppress(Closed):
                super()._run(self._client.close())
            self._stop()

    def within(self, seconds: float) -> SyncClient:
        """The same client with another deadline: `hl.within(2).enqueue(…)`."""
        return cast(SyncClient, _Within(self, seconds))

    def consume(
        self, topic: str, *, prefetch: int = PREFETCH, visibility: float | None = None, holder: str | None = None
    ) -> Iterator[SyncMessage]:
        """`for message in hl.consume("jobs"): …`; what was prefetched goes back when the loop ends."""

        async def begin() -> Consumption:
            return self._client.consume(topic, prefetch=prefetch, visibility=visibility, holder=holder)

        messages = self._run(begin())

        async def following() -> Message | None:
            return await anext(messages, None)

        try:
            while (message := self._run(following())) is not None:
                yield SyncMessage(self, message)
        finally:
            if threading.current_thread() is self._thread:  # collected as garbage there: nobody can wait
                del messages  # which closes it too
            elif self._broker is not None:
                self._run(messages.aclose())


class _Within:
    """Runs where its client runs, with another deadline."""

    def __init__(self, client: SyncClient, seconds: float) -> None:
        self._client, self._calls = client, client._client.within(seconds)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if hasattr(SyncClient, name):
            return found  # it makes several calls, or none
        return self._client._blocking(getattr(self._calls, name), name)
