"""A subscription for code that does not await: plain iteration, and rows whose acks block.

Whatever waits does so in the broker's own thread; `on_assigned` and `on_revoked` are called there too, so they can make
no call of the broker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from heapline.contract.errors import Closed
from heapline.contract.stream import StreamBatch, StreamMessage

Run = Callable[[Any], Any]  # runs a coroutine where the broker lives, and waits for it


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
        """Of a batch: its rows."""
        assert isinstance(self._row, StreamBatch)
        return [SyncRow(self._subscription, row) for row in self._row.messages()]

    def ack(self) -> None:
        self._subscription.ack(self)

    def nack(self, reason: str | None = None) -> None:
        self._subscription.nack(self, reason=reason)

    def __repr__(self) -> str:
        return repr(self._row)


class SyncSubscription:
    def __init__(self, run: Run, subscription: Any) -> None:
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
        """Leave: what is not acked goes to others. A broker that was closed has left already."""
        with contextlib.suppress(Closed):
            self._run(self._subscription.close())


def _unwrapped(rows: Any) -> Any:
    if isinstance(rows, SyncRow):
        return rows._row
    if isinstance(rows, Iterable) and not isinstance(rows, Mapping | str | bytes):
        return [row._row if isinstance(row, SyncRow) else row for row in rows]
    return rows
