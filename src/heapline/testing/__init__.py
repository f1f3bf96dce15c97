"""For tests of what is built on Heapline, and of Heapline itself.

**Your own tests.** `pip install heapline` brings a pytest plugin. `heapline_broker` is a broker in memory: the real
engine, no files, no threads, gone with the test. Its time stands still until you move it.

>>> async def test_reminder_is_sent_after_a_day(heapline_broker, heapline_clock):
...     await heapline_broker.create_topic("mail")
...     await heapline_broker.enqueue("mail", b'{"to": "ada"}', delay=86400, headers={"kind": "reminder"})
...     assert_enqueued(heapline_broker, "mail", {"to": "ada"}, headers={"kind": "reminder"}, count=1)
...     sent = []
...     assert await drain(heapline_broker, lambda m: sent.append(m.payload)) == []  # not due yet
...     heapline_clock.advance(86400)
...     await drain(heapline_broker, lambda m: sent.append(m.payload))
...     assert sent == [b'{"to": "ada"}']

It works under pytest-asyncio and anyio alike. A test that does not await asks for `heapline_sync_broker`:

>>> def test_order_is_billed(heapline_sync_broker):
...     heapline_sync_broker.create_topic("bills")
...     heapline_sync_broker.enqueue("bills", b"17", priority=5)
...     assert_enqueued(heapline_sync_broker, "bills", b"17", priority=5)
...     [bill] = drain_sync(heapline_sync_broker, lambda m: int(m.payload))
...     assert bill.result == 17

Without pytest: `async with memory_broker() as hl`, `with memory_broker_sync() as hl`. `pop(wait=…)` waits in real
seconds, whatever the clock says.

**Heapline's own.** Fake time that passes by itself, a disk that fails on demand, a simulator:

    async def scenario():
        clock = asyncio.get_running_loop().clock          # the loop's own: time passes by itself, at once
        async with EmbeddedBroker("/data", disk=FakeDisk(), io=SimIo(random.Random(1)), clock=clock) as hl: ...

    run(scenario())
"""

from heapline.testing.asserting import assert_enqueued
from heapline.testing.clock import FakeClock
from heapline.testing.disk import FakeDisk, PowerCut
from heapline.testing.draining import Done, drain, drain_sync
from heapline.testing.hand_clock import HandClock
from heapline.testing.io import SimIo
from heapline.testing.loop import Deadlock, SimLoop, run
from heapline.testing.memory import MemoryBroker, SyncMemoryBroker, memory_broker, memory_broker_sync
from heapline.testing.memory_disk import MemoryDisk

__all__ = [
    "Deadlock", "Done", "FakeClock", "FakeDisk", "HandClock", "MemoryBroker", "MemoryDisk", "PowerCut", "SimIo",
    "SimLoop", "SyncMemoryBroker", "assert_enqueued", "drain", "drain_sync", "memory_broker", "memory_broker_sync",
    "run",
]  # fmt: skip
