"""Leased messages as columns, which become `Message` objects only when they are accessed.

`pop(…, lazy=True)` and `consume_batches` return them. A program that needs only the payloads, and acks all of a batch
at once, never creates an object per message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar, overload

from msgspec.structs import replace

from heapline.contract.columns import NO_ROWS, pack, part, pick, unpack
from heapline.contract.ids import to_ulids
from heapline.contract.leases import Leased, LeasedMessages, LeaseKeys, messages_of
from heapline.contract.message import Message

M = TypeVar("M", bound=Message)
_NO_MESSAGES = LeasedMessages(NO_ROWS, NO_ROWS, [], NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS)


class LeasedColumns(Sequence[M]):
    """The messages of one pop, best first. The subclasses settle them: one waits for that, the other blocks."""

    __slots__ = ("_columns", "leased", "settler")

    message_type: ClassVar[type[Message]] = Message

    def __init__(self, settler: Any, leased: Leased) -> None:
        self.settler = settler  # a broker, or what a consumer keeps of the batch
        self.leased = leased  # as the broker answered
        self._columns = leased.messages or _NO_MESSAGES

    # -- messages --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._columns.payloads)

    def __iter__(self) -> Iterator[M]:
        return iter(messages_of(self.settler, self.leased, self.message_type))  # type: ignore[arg-type]

    @overload
    def __getitem__(self, index: int) -> M: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> M | Self:
        if isinstance(index, slice):
            rows = range(*index.indices(len(self)))
            return type(self)(self.settler, replace(self.leased, messages=self._rows(rows) if rows else None))
        row = range(len(self))[index]
        one = replace(self.leased, messages=part(self._columns, row, row + 1))
        return messages_of(self.settler, one, self.message_type)[0]  # type: ignore[return-value]

    def _rows(self, rows: range) -> LeasedMessages:
        return part(self._columns, rows.start, rows.stop) if rows.step == 1 else pick(self._columns, rows)

    # -- columns ---------------------------------------------------------------------------------------------------

    @property
    def topic(self) -> str:
        return self.leased.topic

    @property
    def ids(self) -> list[int]:
        return unpack(self._columns.ids)

    @property
    def message_ids(self) -> list[str]:
        """The ids as ULIDs."""
        return to_ulids(self.ids, self.leased.id_suffix)

    @property
    def payloads(self) -> list[bytes]:
        return self._columns.payloads

    @property
    def priorities(self) -> list[int]:
        return unpack(self._columns.priorities)

    @property
    def attempts(self) -> list[int]:
        return list(bytes(self._columns.attempts))

    @property
    def keys(self) -> list[str | None]:
        return self._columns.keys or [None] * len(self)

    @property
    def headers(self) -> list[dict[str, str]]:
        return [headers or {} for headers in self._columns.headers or [None] * len(self)]

    @property
    def leases(self) -> LeaseKeys:
        """The ids and tokens, as calls on these leases send them."""
        return LeaseKeys(self._columns.ids, self._columns.tokens)

    @property
    def id_suffix(self) -> int:
        """The topic's; see contract/ids.py."""
        return self.leased.id_suffix

    def set_deadlines(self, deadline_ms: Any) -> None:
        """Replace the ends of the leases, because they were extended; -1 means that the lease was lost."""
        ends = zip(unpack(deadline_ms), unpack(self._columns.deadline_ms), strict=True)
        self._columns = replace(self._columns, deadline_ms=pack([new if new >= 0 else old for new, old in ends]))
        self.leased = replace(self.leased, messages=self._columns)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} messages of {self.topic!r}>"


class LeasedBatch(LeasedColumns[Message]):
    """Leased messages as columns. Settle all of them with `ack`, `nack`, `release` or `bury`.

    Indexing and iterating create a `Message` each time. A slice is a batch again, so `await batch[:10].ack()` settles
    ten messages without creating one.
    """

    __slots__ = ()

    async def ack(self) -> None:
        await self.settler.ack(self)

    async def nack(self, backoff: float | None = None, reason: str | None = None) -> None:
        await self.settler.nack(self, backoff=backoff, reason=reason)

    async def release(self) -> None:
        await self.settler.release(self)

    async def extend(self, seconds: float) -> None:
        await self.settler.extend(self, seconds)

    async def bury(self, reason: str | None = None) -> None:
        await self.settler.bury(self, reason=reason)
