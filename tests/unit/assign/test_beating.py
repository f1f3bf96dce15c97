"""A session's heartbeat when writes are not answered, or somebody else has written."""

from __future__ import annotations

import pytest

from heapline.assign.beating import Heart, SessionLost, patience
from heapline.assign.claiming import Claim
from heapline.assign.config import Config
from heapline.assign.errors import ConnectionLost
from heapline.assign.kv import Entry
from heapline.assign.member import Member
from heapline.assign.memory_kv import MemoryKV
from heapline.assign.records import Standing, WorkerRecord, decode, encode, worker_key

KEY = worker_key("w")


class Faulty(MemoryKV):
    """Writes may take time, or not be answered though carried out; reads may be from the past."""

    def __init__(self, place: Place) -> None:
        super().__init__(lambda: place.now)
        self._place = place
        self.seconds = 0.0
        self.is_lossy = False
        self.reads: Entry | None = None

    async def update(self, key: str, value: bytes, revision: int, *, ttl: float | None = None) -> int:
        written = await super().update(key, value, revision, ttl=ttl)
        self._place.now += self.seconds
        if self.is_lossy:
            raise ConnectionLost("no answer")
        return written

    async def get(self, key: str) -> Entry | None:
        return self.reads or await super().get(key)


class Place:
    def __init__(self) -> None:
        self.now = 100.0
        self.kv = Faulty(self)
        self.member = Member("w", "s", 6.0)

    async def heart(self) -> Heart:
        record = encode(WorkerRecord(session="s"))
        revision = await self.kv.create(KEY, record)
        return Heart(self.kv, Config(), lambda: self.now, self.member, Claim("w", "s", revision, self.now, ""))

    async def overwrite(self, record: WorkerRecord) -> None:
        entry = await MemoryKV.get(self.kv, KEY)
        assert entry is not None
        await MemoryKV.update(self.kv, KEY, encode(record), entry.revision)

    async def record(self) -> WorkerRecord:
        entry = await MemoryKV.get(self.kv, KEY)
        assert entry is not None
        record = decode(entry.value, WorkerRecord)
        assert record is not None
        return record


async def test_lease_counts_from_before_the_renewal_was_sent() -> None:
    place = Place()
    heart = await place.heart()
    place.now, place.kv.seconds = 102.0, 1.5
    assert await heart.beat() is not None
    assert place.member.lease.ends_at == pytest.approx(102.0 + 5.7)


async def test_renewal_that_was_not_answered_does_not_prolong_the_lease() -> None:
    place = Place()
    heart = await place.heart()
    place.now, place.kv.is_lossy = 102.0, True
    with pytest.raises(ConnectionLost):
        await heart.beat()
    assert place.member.lease.ends_at == pytest.approx(100.0 + 5.7)


async def test_session_goes_on_from_a_renewal_that_was_carried_out_without_an_answer() -> None:
    place = Place()
    heart = await place.heart()
    place.kv.is_lossy = True
    with pytest.raises(ConnectionLost):
        await heart.beat()
    place.kv.is_lossy, place.now = False, 103.0
    assert await heart.beat() is None  # finds its own record at another revision
    assert await heart.beat() is not None
    assert place.member.lease.ends_at == pytest.approx(103.0 + 5.7)


async def test_conflict_without_a_doubtful_write_means_the_end() -> None:
    place = Place()
    heart = await place.heart()
    await place.overwrite(WorkerRecord(session="s", standing=Standing.ENDED))
    with pytest.raises(SessionLost):
        await heart.beat()


async def test_tombstone_is_found_behind_a_doubtful_write() -> None:
    place = Place()
    heart = await place.heart()
    place.kv.is_lossy = True
    with pytest.raises(ConnectionLost):
        await heart.beat()
    place.kv.is_lossy = False
    await place.overwrite(WorkerRecord(session="s", standing=Standing.ENDED))
    with pytest.raises(SessionLost):
        await heart.beat()


async def test_reading_from_the_past_does_not_end_a_session() -> None:
    place = Place()
    heart = await place.heart()
    assert await heart.beat() is not None
    place.kv.is_lossy = True
    with pytest.raises(ConnectionLost):
        await heart.beat()
    place.kv.is_lossy = False
    place.kv.reads = Entry(KEY, encode(WorkerRecord(session="before")), 1)
    assert await heart.beat() is None
    place.kv.reads = None
    assert await heart.beat() is None
    assert await heart.beat() is not None


async def test_released_session_does_not_beat_any_more() -> None:
    place = Place()
    heart = await place.heart()
    await heart.release()
    assert (await place.record()).standing is Standing.RELEASED
    assert await heart.beat() is None
    assert (await place.record()).standing is Standing.RELEASED


async def test_release_that_was_not_answered_ends_well() -> None:
    place = Place()
    heart = await place.heart()
    place.kv.is_lossy = True
    with pytest.raises(SessionLost):  # the key says released, so it is no longer ours to renew
        await heart.release()
    assert (await place.record()).standing is Standing.RELEASED


def test_renewal_is_given_up_in_time_for_another() -> None:
    assert patience(Config()) == 2.0
    assert patience(Config(heartbeat_ttl=24.0, operation_timeout=5.0)) == 5.0
