"""`async for batch in consume_batches(broker, "jobs")`: leased messages as columns, as they become ready.

A batch is what one pop leases: as many messages as are due, at most `max_messages`. It is prefetched, extended and
returned as a single message is (client/consumer.py). Its leases are extended until it is settled as a whole, until none
of its messages is held, or until the program holds neither the batch nor a part or a message of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from heapline.client.consumer import POP_WAIT, PREFETCH, Consumer, Lease, Prefetcher
from heapline.contract.broker import Broker
from heapline.contract.errors import HeaplineError, LeaseLost
from heapline.contract.leased_batch import LeasedBatch, LeasedColumns
from heapline.contract.leases import Extend, Leased, Pop

BATCH = 100


def consume_batches(
    broker: Broker,
    topic: str,
    max_messages: int = BATCH,
    *,
    prefetch: int = PREFETCH,
    visibility: float | None = None,
    holder: str | None = None,
) -> Consumer[LeasedBatch]:
    """Consume the messages of a topic in batches of up to `max_messages`, from any broker.

    `prefetch` counts batches that wait here beside those being processed. The rest is as in `consume`.
    """
    pop = Pop(topic, max_messages, visibility=visibility, holder=holder)
    return Consumer(BatchPrefetcher(broker, pop, prefetch))


class BatchLease:
    """Settles the messages of a batch. It lives as long as the batch, a part or a message of it, which refer to it."""

    __slots__ = ("__weakref__", "_settler", "count", "id", "keys", "topic")

    def __init__(self, settler: Any, leased: Leased) -> None:
        assert leased.messages is not None
        batch = LeasedBatch(settler, leased)
        self._settler, self.topic, self.keys = settler, batch.topic, batch.leases
        self.id, self.count = batch.ids[0], len(batch)

    def ack(self, held: Any) -> Any:
        return self._settler.ack(held)

    def nack(self, held: Any, *, backoff: float | None = None, reason: str | None = None) -> Any:
        return self._settler.nack(held, backoff=backoff, reason=reason)

    def release(self, held: Any) -> Any:
        return self._settler.release(held)

    def extend(self, held: Any, seconds: float) -> Any:
        return self._settler.extend(held, seconds)

    def bury(self, held: Any, *, reason: str | None = None) -> Any:
        return self._settler.bury(held, reason=reason)


class BatchPrefetcher(Prefetcher):
    """Fetches, keeps and extends batches. `bind` gives a batch to a settler elsewhere."""

    def __init__(
        self, broker: Broker, pop: Pop, prefetch: int, bind: Callable[[Leased], LeasedColumns[Any]] | None = None
    ) -> None:
        super().__init__(broker, pop, prefetch)
        self._bind_batch = bind or (lambda leased: LeasedBatch(BatchLease(self, leased), leased))

    async def _pop_next(self, count: int) -> list[Any]:
        pop = self._pop
        batch = await self._broker.pop(
            pop.topic, pop.max_messages, visibility=pop.visibility, wait=POP_WAIT, holder=pop.holder, lazy=True
        )
        return [batch] if batch else []

    def _hold(self, batch: Any, good_until: float) -> Any:
        bound = self._bind_batch(batch.leased)
        lease: BatchLease = bound.settler
        self._leases[lease.id] = Lease(lease.id, lease, good_until)
        return bound

    def _lease_of(self, held: Any) -> Lease | None:
        """Return the lease of a whole batch. A part or a message of it is settled without ending its lease."""
        if not isinstance(held, LeasedColumns) or len(held) != held.settler.count:
            return None
        lease = self._leases.get(held.settler.id)
        return lease if lease is not None and lease.held() is held.settler else None

    def settled(self, command: Any) -> None:
        ids = command.leases.ids
        lease = self._leases.get(int.from_bytes(ids[:8], "little"))
        batch: BatchLease | None = None if lease is None else lease.held()
        if lease is not None and batch is not None and batch.topic == command.topic and batch.keys == command.leases:
            del self._leases[lease.id]

    async def settle(self, message: Any, failure: str | None = None) -> None:
        with contextlib.suppress(LeaseLost):  # parts of it may be settled already
            await super().settle(message, failure)

    async def _extend(self, leases: list[Lease]) -> None:
        await asyncio.gather(*map(self._extend_batch, leases))

    async def _extend_batch(self, lease: Lease) -> None:
        batch: BatchLease | None = lease.held()
        if batch is None or self._leases.get(lease.id) is not lease:
            return
        good_until = self._now() + self._seconds
        with contextlib.suppress(HeaplineError, TimeoutError):  # it stays due
            async with asyncio.timeout(self._seconds / 3):
                extended = await self._broker.do(Extend(batch.topic, batch.keys, self._seconds))
            if self._leases.get(lease.id) is lease:
                lease.good_until = max(lease.good_until, good_until)
                if len(extended.lost) == batch.count:
                    del self._leases[lease.id]

    async def _return(self, unstarted: list[Any]) -> None:
        for batch in unstarted:
            with contextlib.suppress(LeaseLost):  # the others may still be held
                await self._broker.release(batch)
