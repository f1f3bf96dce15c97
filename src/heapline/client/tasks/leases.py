"""Extend all leases of a worker together, at a third of the visibility.

The run of a message is notified when its lease is lost, because another worker may have the message. A lease is lost if
the broker says so, or if it could not be extended before it expired by the worker's own clock: while the broker cannot
be reached, a handler must not assume that the message is still its own.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from heapline.contract.errors import HeaplineError, LeaseLost
from heapline.contract.message import Message
from heapline.logs import Log

log = Log("heapline.worker")
BLOCKED_SHARE = 6  # waking late by more than this part of the visibility is logged
RETRY_SHARE = 12  # a failed extension is retried after this part of the visibility


class Lease:
    """One message that the worker holds."""

    __slots__ = ("_first_ms", "_until", "asked_until", "is_lost", "message", "on_lost")

    def __init__(self, message: Message, until: float) -> None:
        self.message = message
        self.is_lost = False
        self.on_lost: Callable[[], None] | None = None
        self._until = until  # on the loop's clock, of the lease as it was granted
        self.asked_until = until  # it ends no later than requested, even if the broker's clock jumps
        self._first_ms = message._deadline_ms

    @property
    def until(self) -> float:
        """The end of the lease, on the loop's clock. Only differences of the broker's times are used."""
        return min(self.asked_until, self._until + (self.message._deadline_ms - self._first_ms) / 1000)


class LeaseKeeper:
    def __init__(self, broker: Any, visibility: float) -> None:
        self._broker = broker
        self._visibility = visibility
        self._held: dict[tuple[str, int], Lease] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, message: Message) -> Lease:
        """Extend the lease of a message that was just popped."""
        if (before := self._held.get((message.topic, message.id))) is not None:
            self._lose(before)  # the broker has delivered it again, to this worker
        lease = Lease(message, asyncio.get_running_loop().time() + self._visibility)
        self._held[message.topic, message.id] = lease
        return lease

    def let_go(self, lease: Lease) -> None:
        """Stop extending a lease."""
        key = (lease.message.topic, lease.message.id)
        if self._held.get(key) is lease:
            del self._held[key]

    async def keep(self) -> None:
        """Extend leases until cancelled."""
        loop = asyncio.get_running_loop()
        beat = loop.time()
        while True:
            beat = max(beat + self._visibility / 3, loop.time())
            await self._rest_until(beat)
            while not await self._extend():
                await self._rest_until(loop.time() + self._visibility / RETRY_SHARE)

    async def _rest_until(self, moment: float) -> None:
        """Sleep, but wake when a lease expires."""
        loop = asyncio.get_running_loop()
        while (now := loop.time()) < moment:
            ends = min((lease.until for lease in self._held.values()), default=moment)
            wanted = max(now + 0.001, min(moment, ends))
            await asyncio.sleep(wanted - now)
            if (late := loop.time() - wanted) > self._visibility / BLOCKED_SHARE:
                log.warning(
                    "event loop was blocked, so leases could not be extended; "
                    "declare handlers that compute or block with a plain def",
                    seconds=round(late, 1),
                )
            self._lose_the_late(loop.time())

    def _lose_the_late(self, now: float) -> None:
        for lease in [lease for lease in self._held.values() if lease.until <= now]:
            log.warning("lease expired because it could not be extended", message=lease.message.message_id)
            self._lose(lease)

    async def _extend(self) -> bool:
        """Return whether the broker has answered for every topic."""
        by_topic: defaultdict[str, list[Message]] = defaultdict(list)
        for lease in self._held.values():
            by_topic[lease.message.topic].append(lease.message)
        answers = await asyncio.gather(*(self._extend_topic(t, messages) for t, messages in by_topic.items()))
        return all(answers)

    async def _extend_topic(self, topic: str, messages: list[Message]) -> bool:
        held = {m.id: self._held[topic, m.id] for m in messages}
        asked_until = asyncio.get_running_loop().time() + self._visibility
        try:
            async with asyncio.timeout(self._visibility / 3):
                await self._broker.extend(messages, self._visibility)
        except LeaseLost as error:
            for id in error.lost:
                if (lease := held.pop(id, None)) is not None and self._held.get((topic, id)) is lease:
                    self._lose(lease)
        except (HeaplineError, TimeoutError) as error:
            log.warning("leases could not be extended; will retry", topic=topic, error=type(error).__name__)
            return False
        except Exception:  # nothing may stop the heartbeat
            log.exception("leases could not be extended; will retry", topic=topic)
            return False
        for lease in held.values():
            lease.asked_until = max(lease.asked_until, asked_until)
        return True

    def _lose(self, lease: Lease) -> None:
        lease.is_lost = True
        self.let_go(lease)
        if lease.on_lost is not None:
            lease.on_lost()
