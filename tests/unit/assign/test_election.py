"""Election through the store: another worker takes the lease only if it was not renewed for its full length."""

from __future__ import annotations

import pytest

from heapline.assign.election import LEADER_KEY, KVElection, LeaderRecord, NumberedElection
from heapline.assign.errors import ConnectionLost, ElectionFailed
from heapline.assign.kv import MemoryKV, decode_record

LEASE = 6.0


class Rig:
    def __init__(self, kv: type[MemoryKV] = MemoryKV) -> None:
        self.now = 100.0
        self.kv = kv(self.clock)
        self.a, self.b = KVElection(self.kv, self.clock, "a"), KVElection(self.kv, self.clock, "b")

    def clock(self) -> float:
        return self.now


class Lossy(MemoryKV):
    """Writes are applied without an answer while `is_lossy`."""

    is_lossy = False

    async def update(self, key: str, value: bytes, revision: int, *, ttl: float | None = None) -> int:
        written = await super().update(key, value, revision, ttl=ttl)
        if self.is_lossy:
            raise ConnectionLost("no answer")
        return written


async def test_first_to_request_leads_and_the_second_does_not() -> None:
    rig = Rig()
    assert await rig.a.request_leadership("worker-0", LEASE)
    assert not await rig.b.request_leadership("worker-1", LEASE)
    assert await rig.a.is_leader()
    assert not await rig.b.is_leader()


async def test_leader_stops_on_its_own_clock_before_another_can_lead() -> None:
    rig = Rig()
    await rig.a.request_leadership("worker-0", LEASE)
    assert not await rig.b.request_leadership("worker-1", LEASE)
    rig.now += 5.71
    assert not await rig.a.is_leader()
    assert not await rig.b.request_leadership("worker-1", LEASE)
    with pytest.raises(ElectionFailed):
        await rig.a.renew_leadership()
    rig.now += 0.3
    assert await rig.b.request_leadership("worker-1", LEASE)


async def test_renewal_keeps_other_workers_from_leading() -> None:
    rig = Rig()
    await rig.a.request_leadership("worker-0", LEASE)
    for _ in range(10):
        rig.now += 2
        await rig.a.renew_leadership()
        assert not await rig.b.request_leadership("worker-1", LEASE)


async def test_released_leadership_is_free_immediately() -> None:
    rig = Rig()
    await rig.a.request_leadership("worker-0", LEASE)
    await rig.a.release_leadership()
    assert not await rig.a.is_leader()
    assert await rig.b.request_leadership("worker-1", LEASE)


async def test_epochs_rise_with_every_leader() -> None:
    rig = Rig()
    assert isinstance(rig.a, NumberedElection)
    epochs = []
    for agent in (rig.a, rig.b, rig.a):
        assert await agent.request_leadership("worker", LEASE)
        epochs.append(agent.epoch)
        await agent.release_leadership()
    rig.b.stay_above(40)
    assert await rig.b.request_leadership("worker", LEASE)
    epochs.append(rig.b.epoch)
    assert epochs == [1, 2, 3, 41]


async def test_leader_stops_when_its_record_is_overwritten() -> None:
    rig = Rig()
    await rig.a.request_leadership("worker-0", LEASE)
    entry = await rig.kv.get(LEADER_KEY)
    assert entry is not None
    await rig.kv.update(LEADER_KEY, b"{}", entry.revision)
    with pytest.raises(ElectionFailed):
        await rig.a.renew_leadership()
    assert not await rig.a.is_leader()


async def test_unanswered_renewal_is_picked_up_by_the_next() -> None:
    rig = Rig(Lossy)
    await rig.a.request_leadership("worker-0", LEASE)
    assert isinstance(rig.kv, Lossy)
    rig.kv.is_lossy = True
    rig.now += 2
    with pytest.raises(ConnectionLost):
        await rig.a.renew_leadership()
    rig.kv.is_lossy = False
    rig.now += 2
    await rig.a.renew_leadership()
    rig.now += 5
    assert await rig.a.is_leader()


async def test_record_names_the_leading_worker() -> None:
    rig = Rig()
    await rig.a.request_leadership("worker-7", LEASE)
    entry = await rig.kv.get(LEADER_KEY)
    assert entry is not None
    record = decode_record(entry.value, LeaderRecord)
    assert record == LeaderRecord(worker="worker-7", session="a", epoch=1)


async def test_leadership_is_taken_in_a_recreated_store_with_lower_revisions() -> None:
    """A lower revision is a stale reading unless it persists for a lease; compare-and-set decides in the end."""
    rig = Rig()
    for n in range(9):
        await rig.kv.create(f"filler.{n}", b"")
    assert await rig.a.request_leadership("w-0", LEASE)
    assert not await rig.b.request_leadership("w-1", LEASE)
    rig.kv._stored.clear()
    rig.kv._revision = 0
    assert await KVElection(rig.kv, rig.clock, "c").request_leadership("w-2", LEASE)  # and it crashes
    assert not await rig.b.request_leadership("w-1", LEASE)
    rig.now += LEASE - 0.1
    assert not await rig.b.request_leadership("w-1", LEASE)
    rig.now += 0.2
    assert await rig.b.request_leadership("w-1", LEASE)
