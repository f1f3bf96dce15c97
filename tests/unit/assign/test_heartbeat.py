"""A session's heartbeat when writes get no answer or another process has written."""

from __future__ import annotations

import pytest

from heapline.assign.config import Config
from heapline.assign.errors import ConnectionLost
from heapline.assign.heartbeat import Heartbeat, SessionLost
from heapline.assign.kv import Entry, MemoryKV, decode_record, encode_record
from heapline.assign.logger import log_to
from heapline.assign.member import Member
from heapline.assign.worker_ids import Claim, Standing, WorkerRecord, worker_key

KEY = worker_key("w")


class Faulty(MemoryKV):
    """Writes may be slow, or applied without an answer; reads may be stale."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(lambda: rig.now)
        self._place = rig
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


class Rig:
    def __init__(self) -> None:
        self.now = 100.0
        self.kv = Faulty(self)
        self.member = Member("w", "s", 6.0)

    async def heartbeat(self) -> Heartbeat:
        record = encode_record(WorkerRecord(session="s"))
        revision = await self.kv.create(KEY, record)
        claim = Claim("w", "s", revision, self.now, "")
        return Heartbeat(self.kv, Config(), lambda: self.now, self.member, claim, log_to(None))

    async def overwrite(self, record: WorkerRecord) -> None:
        entry = await MemoryKV.get(self.kv, KEY)
        assert entry is not None
        await MemoryKV.update(self.kv, KEY, encode_record(record), entry.revision)

    async def record(self) -> WorkerRecord:
        entry = await MemoryKV.get(self.kv, KEY)
        assert entry is not None
        record = decode_record(entry.value, WorkerRecord)
        assert record is not None
        return record


async def test_lease_counts_from_before_the_renewal_was_sent() -> None:
    rig = Rig()
    heartbeat = await rig.heartbeat()
    rig.now, rig.kv.seconds = 102.0, 1.5
    assert await heartbeat.renew() is not None
    assert rig.member.lease.ends_at == pytest.approx(102.0 + 5.7)


async def test_unanswered_renewal_does_not_extend_the_lease() -> None:
    rig = Rig()
    heartbeat = await rig.heartbeat()
    rig.now, rig.kv.is_lossy = 102.0, True
    with pytest.raises(ConnectionLost):
        await heartbeat.renew()
    assert rig.member.lease.ends_at == pytest.approx(100.0 + 5.7)


async def test_session_continues_from_a_renewal_applied_without_an_answer() -> None:
    rig = Rig()
    heartbeat = await rig.heartbeat()
    rig.kv.is_lossy = True
    with pytest.raises(ConnectionLost):
        await heartbeat.renew()
    rig.kv.is_lossy, rig.now = False, 103.0
    assert await heartbeat.renew() is None  # finds its own record at another revision
    assert await heartbeat.renew() is not None
    assert rig.member.lease.ends_at == pytest.approx(103.0 + 5.7)


async def test_conflict_without_an_unanswered_write_ends_the_session() -> None:
    rig = Rig()
    heartbeat = await rig.heartbeat()
    await rig.overwrite(WorkerRecord(session="s", standing=Standing.ENDED))
    with pytest.raises(SessionLost):
        await heartbeat.renew()


async def test_tombstone_is_found_after_an_unanswered_write() -> None:
    rig = Rig()
    heartbeat = await rig.heartbeat()
    rig.kv.is_lossy = True
    with pytest.raises(ConnectionLost):
        await heartbeat.renew()
    rig.kv.is_lossy = False
    await rig.overwrite(WorkerRecord(session="s", standing=Standing.ENDED))
    with pytest.raises(SessionLost):
        await heartbeat.renew()


async def test_stale_read_does_not_end_a_session() -> None:
    rig = Rig()
    heartbeat = await rig.heartbeat()
    assert await heartbeat.renew() is not None
    rig.kv.is_lossy = True
    with pytest.raises(ConnectionLost):
        await heartbeat.renew()
    rig.kv.is_lossy = False
    rig.kv.reads = Entry(KEY, encode_record(WorkerRecord(session="before")), 1)
    assert await heartbeat.renew() is None
    rig.kv.reads = None
    assert await heartbeat.renew() is None
    assert await heartbeat.renew() is not None


async def test_released_session_does_not_renew() -> None:
    rig = Rig()
    heartbeat = await rig.heartbeat()
    await heartbeat.release()
    assert (await rig.record()).standing is Standing.RELEASED
    assert await heartbeat.renew() is None
    assert (await rig.record()).standing is Standing.RELEASED


async def test_unanswered_release_ends_with_session_lost() -> None:
    rig = Rig()
    heartbeat = await rig.heartbeat()
    rig.kv.is_lossy = True
    with pytest.raises(SessionLost):  # the key is already released, so it can no longer be renewed
        await heartbeat.release()
    assert (await rig.record()).standing is Standing.RELEASED


def test_store_timeout_leaves_time_for_another_renewal() -> None:
    assert Config().store_timeout == 2.0
    assert Config(heartbeat_ttl=24.0, operation_timeout=5.0).store_timeout == 5.0
