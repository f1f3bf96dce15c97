"""Tools for testing programs that use Heapline.

`pip install heapline` includes a pytest plugin. `heapline_broker` is an in-memory broker: the real engine, without
files or threads, discarded after the test. Its clock does not move until you advance it.

>>> async def test_reminder_is_sent_after_a_day(heapline_broker, heapline_clock):
...     await heapline_broker.create_topic("mail")
...     await heapline_broker.enqueue("mail", b'{"to": "ada"}', delay=86400, headers={"kind": "reminder"})
...     assert_enqueued(heapline_broker, "mail", {"to": "ada"}, headers={"kind": "reminder"}, count=1)
...     sent = []
...     assert await drain(heapline_broker, lambda m: sent.append(m.payload)) == []  # not due yet
...     heapline_clock.advance(86400)
...     await drain(heapline_broker, lambda m: sent.append(m.payload))
...     assert sent == [b'{"to": "ada"}']

It works with both pytest-asyncio and anyio. A test that does not await uses `heapline_sync_broker`:

>>> def test_order_is_billed(heapline_sync_broker):
...     heapline_sync_broker.create_topic("bills")
...     heapline_sync_broker.enqueue("bills", b"17", priority=5)
...     assert_enqueued(heapline_sync_broker, "bills", b"17", priority=5)
...     [bill] = drain_sync(heapline_sync_broker, lambda m: int(m.payload))
...     assert bill.result == 17

Without pytest: `async with memory_broker() as hl`, `with memory_broker_sync() as hl`. `pop(wait=…)` waits in real
seconds, whatever the clock shows.
"""

from heapline.testing.assertions import assert_enqueued
from heapline.testing.clock import FakeClock, HandClock
from heapline.testing.drainer import Done, drain, drain_sync
from heapline.testing.memory import MemoryBroker, SyncMemoryBroker, memory_broker, memory_broker_sync
from heapline.testing.memory_disk import MemoryDisk

__all__ = [
    "Done",
    "FakeClock",
    "HandClock",
    "MemoryBroker",
    "MemoryDisk",
    "SyncMemoryBroker",
    "assert_enqueued",
    "drain",
    "drain_sync",
    "memory_broker",
    "memory_broker_sync",
]
