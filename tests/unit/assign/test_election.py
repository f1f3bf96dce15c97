"""The election through the store: one lease, taken over only when it has stood still for a full one."""

from __future__ import annotations

import pytest

from heapline.assign.election import KVElection, NumberedElection
from heapline.assign.errors import ConnectionLost, ElectionFailed
from heapline.assign.memory_kv import MemoryKV
from heapline.assign.records import LEADER_KEY, LeaderRecord, decode

LEASE = 6.0


class Place:
    def __init__(self, kv: type[MemoryKV] = MemoryKV) -> None:
        self.now = 100.0
        self.kv = kv(self.clock)
        self.a, self.b = KVElection(self.kv, self.clock, "a"), KVElection(self.kv, self.clock, "b")

    def clock(self) -> float:
        return self.now


class Lossy(MemoryKV):
    """Writes are carried out and not answered while `is_lossy`."""

    is_lossy = False

    async def update(self, key: str, value: bytes, revision: int, *, ttl: float | None = None) -> int:
        written = await super().update(key, value, revision, ttl=ttl)
        if self.is_lossy:
            raise ConnectionLost("no answer")
        return written


async def test_first_to_ask_leads_and_the_second_does_not() -> None:
    place = Place()
    assert await place.a.request_leadership("worker-0", LEASE)
    assert not await place.b.request_leadership("worker-1", LEASE)
    assert await place.a.is_leader()
    assert not await place.b.is_leader()


async def test_lead_is_given_up_by_the_own_clock_before_anybody_takes_it() -> None:
    place = Place()
    await place.a.request_leadership("worker-0", LEASE)
    assert not await place.b.request_leadership("worker-1", LEASE)
    place.now += 5.71
    assert not await place.a.is_leader()
    assert not await place.b.request_leadership("worker-1", LEASE)
    with pytest.raises(ElectionFailed):
        await place.a.renew_leadership()
    place.now += 0.3
    assert await place.b.request_leadership("worker-1", LEASE)


async def test_renewal_keeps_others_away() -> None:
    place = Place()
    await place.a.request_leadership("worker-0", LEASE)
    for _ in range(10):
        place.now += 2
        await place.a.renew_leadership()
        assert not await place.b.request_leadership("worker-1", LEASE)


async def test_released_lead_is_free_at_once() -> None:
    place = Place()
    await place.a.request_leadership("worker-0", LEASE)
    await place.a.release_leadership()
    assert not await place.a.is_leader()
    assert await place.b.request_leadership("worker-1", LEASE)


async def test_epochs_rise_with_every_leader() -> None:
    place = Place()
    assert isinstance(place.a, NumberedElection)
    epochs = []
    for agent in (place.a, place.b, place.a):
        assert await agent.request_leadership("worker", LEASE)
        epochs.append(agent.epoch)
        await agent.release_leadership()
    place.b.stay_above(40)
    assert await place.b.request_leadership("worker", LEASE)
    epochs.append(place.b.epoch)
    assert epochs == [1, 2, 3, 41]


async def test_leader_whose_record_somebody_else_wrote_over_leads_no_more() -> None:
    place = Place()
    await place.a.request_leadership("worker-0", LEASE)
    entry = await place.kv.get(LEADER_KEY)
    assert entry is not None
    await place.kv.update(LEADER_KEY, b"{}", entry.revision)
    with pytest.raises(ElectionFailed):
        await place.a.renew_leadership()
    assert not await place.a.is_leader()


async def test_renewal_that_was_not_answered_is_picked_up_by_the_next() -> None:
    place = Place(Lossy)
    await place.a.request_leadership("worker-0", LEASE)
    assert isinstance(place.kv, Lossy)
    place.kv.is_lossy = True
    place.now += 2
    with pytest.raises(ConnectionLost):
        await place.a.renew_leadership()
    place.kv.is_lossy = False
    place.now += 2
    await place.a.renew_leadership()
    place.now += 5
    assert await place.a.is_leader()


async def test_record_names_the_worker_that_leads() -> None:
    place = Place()
    await place.a.request_leadership("worker-7", LEASE)
    entry = await place.kv.get(LEADER_KEY)
    assert entry is not None
    record = decode(entry.value, LeaderRecord)
    assert record == LeaderRecord(worker="worker-7", session="a", epoch=1)


async def test_lead_in_a_store_that_was_made_anew_is_taken_although_its_revisions_are_lower() -> None:
    """A lower revision is a reading from the past, unless it stays for a lease; compare-and-set decides in the end."""
    place = Place()
    for n in range(9):
        await place.kv.create(f"filler.{n}", b"")
    assert await place.a.request_leadership("w-0", LEASE)
    assert not await place.b.request_leadership("w-1", LEASE)
    place.kv._kept.clear()
    place.kv._revision = 0
    assert await KVElection(place.kv, place.clock, "c").request_leadership("w-2", LEASE)  # and it crashes
    assert not await place.b.request_leadership("w-1", LEASE)
    place.now += LEASE - 0.1
    assert not await place.b.request_leadership("w-1", LEASE)
    place.now += 0.2
    assert await place.b.request_leadership("w-1", LEASE)
