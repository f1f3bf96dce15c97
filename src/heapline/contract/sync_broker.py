"""The methods of a broker for code that does not await: an event loop in a thread of its own runs the broker.

Every method is the one of `Broker`; this class only waits for it. Messages, rows and subscriptions that it returns act
on it, so `message.ack()` blocks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

from msgspec.structs import astuple

from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest, Closed
from heapline.contract.keywords import GroupKeywords
from heapline.contract.leased_batch import LeasedBatch, LeasedColumns
from heapline.contract.message import LogFrame, Message
from heapline.contract.methods import Methods
from heapline.contract.replays import Mode
from heapline.contract.stream import GroupEvents, Place, ReplayFilter, StreamBatch, StreamMessage

T = TypeVar("T")


class SyncMessage(Message):
    """A leased message whose acts block."""

    def ack(self) -> None:  # type: ignore[override]
        self._sync.ack(self)

    def nack(self, backoff: float | None = None, reason: str | None = None) -> None:  # type: ignore[override]
        self._sync.nack(self, backoff=backoff, reason=reason)

    def release(self) -> None:  # type: ignore[override]
        self._sync.release(self)

    def extend(self, seconds: float) -> None:  # type: ignore[override]
        self._sync.extend(self, seconds)

    def bury(self, reason: str | None = None) -> None:  # type: ignore[override]
        self._sync.bury(self, reason=reason)

    @property
    def _sync(self) -> SyncBroker:
        return cast("SyncBroker", self._broker)


class SyncLeasedBatch(LeasedColumns[SyncMessage]):
    """Leased messages as columns, as in LeasedBatch, whose acts block."""

    __slots__ = ()

    message_type = SyncMessage

    def ack(self) -> None:
        self.settler.ack(self)

    def nack(self, backoff: float | None = None, reason: str | None = None) -> None:
        self.settler.nack(self, backoff=backoff, reason=reason)

    def release(self) -> None:
        self.settler.release(self)

    def extend(self, seconds: float) -> None:
        self.settler.extend(self, seconds)

    def bury(self, reason: str | None = None) -> None:
        self.settler.bury(self, reason=reason)


class SyncBroker(Methods):
    """Use it with `with`. Safe to call from several threads."""

    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _broker: Any = None

    def __init__(self, open: Callable[[], Coroutine[Any, Any, Broker]]) -> None:
        self._open = open
        self._lock = threading.Lock()  # around handing work to the loop, and ending it

    # -- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._start()
        try:
            self._broker = self._run(self._open())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            broker, self._broker = self._broker, None
        if broker is not None:
            self._run(broker.close())
            self._stop()

    def _start(self) -> None:
        ready = threading.Event()
        loop = asyncio.new_event_loop()

        def serve() -> None:
            asyncio.set_event_loop(loop)
            loop.call_soon(ready.set)
            loop.run_forever()
            loop.run_until_complete(_cancel_the_rest())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

        self._loop = loop
        self._thread = threading.Thread(target=serve, name="heapline", daemon=True)
        self._thread.start()
        ready.wait()

    def _stop(self) -> None:
        """Stop the loop. Calls in progress are cancelled, and their callers receive Closed."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    # -- calls -----------------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        self._refuse_own_thread(work)
        with self._lock:
            if self._loop is None:
                work.close()
                raise Closed
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Closed from None  # by another thread, while this one waited
        except BaseException:
            future.cancel()
            raise

    def _refuse_own_thread(self, work: Coroutine[Any, Any, Any]) -> None:
        """A call from within the loop would wait for itself, forever."""
        with contextlib.suppress(RuntimeError):  # no loop runs in this thread, as it should be
            if asyncio.get_running_loop() is self._loop:
                work.close()
                raise BadRequest("on_assigned and on_revoked run in the broker's own thread; call it from another one")

    def _inner(self) -> Any:
        if self._broker is None:
            raise Closed
        return self._broker

    def _blocking(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The method of this name, waited for. See `broker.method`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._own(self._run(getattr(self._inner(), name)(*args, **kwargs)))

        call.__name__, call.__doc__ = name, function.__doc__
        whole = inspect.signature(function)
        call.__signature__ = whole.replace(parameters=list(whole.parameters.values())[1:])  # type: ignore[attr-defined]
        return call

    def _own(self, result: Any) -> Any:
        """Messages act on this broker."""
        if isinstance(result, list) and result and type(result[0]) is Message:
            return [_sync_message(self, m) for m in result]
        if type(result) is LeasedBatch:
            return SyncLeasedBatch(self, result.leased)
        return result

    def subscribe(
        self,
        topic: str,
        *,
        group: str,
        member: str | None = None,
        credits: int = 1000,
        batches: bool = False,
        start: Place = "earliest",
        on_assigned: GroupEvents | None = None,
        on_revoked: GroupEvents | None = None,
        **config: Unpack[GroupKeywords],
    ) -> SyncSubscription:
        """`with hl.subscribe("jobs", group="billing") as rows: …`, and iterate; see Broker.subscribe."""
        subscribe = partial(self._inner().subscribe, topic, group=group, member=member, credits=credits)
        events = {"on_assigned": on_assigned, "on_revoked": on_revoked}

        async def begin() -> Any:
            return subscribe(batches=batches, start=start, **events, **config)

        return SyncSubscription(self._run, self._run(begin()))

    def read_log(self, topic: str, partition: int = 0, start: int = 0, end: int | None = None) -> Iterator[LogFrame]:
        """Read the events of a partition, one durable frame at a time."""
        return self._iterate(self._inner().read_log(topic, partition, start, end))

    def replay(
        self,
        topic: str,
        *,
        start: Place = "earliest",
        end: Place | None = None,
        partitions: Sequence[int] | None = None,
        mode: Mode = "all",
        where: ReplayFilter | None = None,
        rate: float | None = None,
        checkpoint: str | None = None,
        batches: bool = False,
        allow_gaps: bool = False,
        count: int | None = None,
    ) -> Iterator[StreamMessage | StreamBatch]:
        """Read the stream again; see Broker.replay."""
        # A row is done when the next one is requested. Without a checkpoint nothing counts, so rows come in batches.
        whole = batches or checkpoint is None
        read = partial(self._inner().replay, topic, start=start, end=end, partitions=partitions, mode=mode, where=where)
        rows = read(rate=rate, checkpoint=checkpoint, batches=whole, allow_gaps=allow_gaps, count=count)
        if batches or not whole:
            return self._iterate(rows)
        return (row for batch in self._iterate(rows) for row in batch.messages())

    def _iterate(self, rows: Any) -> Iterator[Any]:
        async def following() -> Any:
            return await anext(rows, None)

        try:
            while (row := self._run(following())) is not None:
                yield row
        finally:
            if self._broker is not None and threading.current_thread() is not self._thread:
                self._run(rows.aclose())


def _sync_message(broker: SyncBroker, message: Message) -> SyncMessage:
    return SyncMessage(broker, *astuple(message)[1:])  # type: ignore[arg-type]


async def _cancel_the_rest() -> None:
    """End what still runs when the loop has stopped: threads wait for it."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


class SyncRow:
    """A row of a stream, or a batch of them, whose acts block; everything else is as the row has it."""

    __slots__ = ("_row", "_subscription")

    def __init__(self, subscription: SyncSubscription, row: StreamMessage | StreamBatch) -> None:
        self._subscription, self._row = subscription, row

    def __getattr__(self, name: str) -> Any:
        return getattr(self._row, name)

    def __len__(self) -> int:
        return len(self._row)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    def messages(self) -> list[SyncRow]:
        """Return the rows of a batch."""
        assert isinstance(self._row, StreamBatch)
        return [SyncRow(self._subscription, row) for row in self._row.messages()]

    def ack(self) -> None:
        self._subscription.ack(self)

    def nack(self, reason: str | None = None) -> None:
        self._subscription.nack(self, reason=reason)

    def __repr__(self) -> str:
        return repr(self._row)


class SyncSubscription:
    """A subscription whose iteration and acks block.

    `run` runs a coroutine in the broker's own thread and waits for it. `on_assigned` and `on_revoked` are called in
    that thread too, so they cannot call the broker.
    """

    def __init__(self, run: Callable[[Any], Any], subscription: Any) -> None:
        self._run, self._subscription = run, subscription

    def __getattr__(self, name: str) -> Any:
        """topic, group, member, partitions."""
        return getattr(self._subscription, name)

    def __enter__(self) -> SyncSubscription:
        self._run(self._subscription.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[SyncRow]:
        rows = aiter(self._subscription)

        async def following() -> Any:
            return await anext(rows, None)

        while (row := self._run(following())) is not None:
            yield SyncRow(self, row)

    def ack(self, rows: Any) -> None:
        """Rows or batches, one or many, or {partition: offsets}."""
        self._run(self._subscription.ack(_unwrapped(rows)))

    def nack(self, rows: Any, *, reason: str | None = None) -> None:
        self._run(self._subscription.nack(_unwrapped(rows), reason=reason))

    def close(self) -> None:
        """Leave: unacked rows are delivered to other members. A broker that was closed has left already."""
        with contextlib.suppress(Closed):
            self._run(self._subscription.close())


def _unwrapped(rows: Any) -> Any:
    if isinstance(rows, SyncRow):
        return rows._row
    if isinstance(rows, Iterable) and not isinstance(rows, Mapping | str | bytes):
        return [row._row if isinstance(row, SyncRow) else row for row in rows]
    return rows
