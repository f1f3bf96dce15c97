"""For tests of what is built on Heapline, and of Heapline itself: fake time, a disk that fails on demand, a simulator.

from heapline.testing import FakeClock, FakeDisk, SimIo, run

async def scenario():
    clock = asyncio.get_running_loop().clock          # the loop's own: time passes by itself, at once
    async with EmbeddedBroker("/data", disk=FakeDisk(), io=SimIo(random.Random(1)), clock=clock) as hl: ...

run(scenario())
"""

from heapline.testing.clock import FakeClock
from heapline.testing.disk import FakeDisk, PowerCut
from heapline.testing.io import SimIo
from heapline.testing.loop import Deadlock, SimLoop, run

__all__ = ["Deadlock", "FakeClock", "FakeDisk", "PowerCut", "SimIo", "SimLoop", "run"]
