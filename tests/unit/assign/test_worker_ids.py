"""Claims of worker ids, and when an id is free."""

from __future__ import annotations

import itertools

import pytest

from heapline.assign.config import Config
from heapline.assign.errors import ConnectionLost, StableIDExhausted
from heapline.assign.kv import MemoryKV, decode_record, encode_record
from heapline.assign.worker_ids import Claim, Claimer, Standing, WorkerRecord, worker_key

CONFIG = Config(worker_id_max=2)


class Rig:
    def __init__(self) -> None:
        self.now = 0.0
        self.kv = MemoryKV(lambda: self.now)
        self._numbers = itertools.count(1)

    def claimer(self) -> Claimer:
        return Claimer(self.kv, CONFIG, lambda: self.now, lambda: f"s{next(self._numbers)}")

    async def put(self, worker: str, record: WorkerRecord) -> int:
        entry = await self.kv.get(worker_key(worker))
        if entry is None:
            return await self.kv.create(worker_key(worker), encode_record(record))
        return await self.kv.update(worker_key(worker), encode_record(record), entry.revision)


def claimed(claim: Claim | None) -> Claim:
    assert claim is not None
    return claim


async def test_ids_are_claimed_from_the_lowest() -> None:
    rig = Rig()
    claims = [claimed(await rig.claimer().claim()) for _ in range(3)]
    assert [claim.worker for claim in claims] == ["worker-0", "worker-1", "worker-2"]
    assert len({claim.session for claim in claims}) == 3
    with pytest.raises(StableIDExhausted):
        await rig.claimer().claim()


async def test_claim_waits_if_an_id_is_only_reserved() -> None:
    rig = Rig()
    for _ in range(2):
        await rig.claimer().claim()
    await rig.put("worker-2", WorkerRecord(session="crashed", standing=Standing.ENDED))
    assert await rig.claimer().claim() is None


async def test_released_id_is_free_immediately_and_preferred_to_a_lower_one() -> None:
    rig = Rig()
    await rig.put("worker-2", WorkerRecord(session="old", standing=Standing.RELEASED))
    claim = claimed(await rig.claimer().claim())
    assert (claim.worker, claim.follows) == ("worker-2", "old")


async def test_most_recently_released_id_is_claimed_first() -> None:
    rig = Rig()
    await rig.put("worker-2", WorkerRecord(session="x", standing=Standing.RELEASED))
    await rig.put("worker-1", WorkerRecord(session="y", standing=Standing.RELEASED))
    assert claimed(await rig.claimer().claim()).worker == "worker-1"


@pytest.mark.parametrize("standing", [Standing.ENDED, Standing.BARRED])
async def test_crashed_workers_id_is_reserved_for_worker_id_ttl(standing: Standing) -> None:
    rig, old = Rig(), WorkerRecord(session="old", standing=standing)
    for worker in ("worker-0", "worker-1", "worker-2"):
        await rig.put(worker, old)
    claimer = rig.claimer()
    assert await claimer.claim() is None
    rig.now = 29.9
    assert await claimer.claim() is None
    rig.now = 30.0
    claim = claimed(await claimer.claim())
    assert claim.follows == ("old" if standing is Standing.ENDED else "")


async def test_cut_off_worker_reclaims_its_own_id_immediately() -> None:
    rig = Rig()
    await rig.put("worker-1", WorkerRecord(session="mine", standing=Standing.ENDED))
    assert claimed(await rig.claimer().claim("worker-1")).worker == "worker-1"


async def test_worker_takes_another_id_if_its_own_is_taken() -> None:
    rig = Rig()
    await rig.put("worker-0", WorkerRecord(session="other"))
    assert claimed(await rig.claimer().claim("worker-0")).worker == "worker-1"


async def test_unanswered_claim_is_found_by_the_next_pass() -> None:
    class Lossy(MemoryKV):
        async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
            await super().create(key, value, ttl=ttl)
            raise ConnectionLost("no answer")

    rig = Rig()
    rig.kv = Lossy(lambda: rig.now)
    claimer = rig.claimer()
    with pytest.raises(ConnectionLost):
        await claimer.claim()
    claim = claimed(await claimer.claim())
    assert claim.worker == "worker-0"
    entry = await rig.kv.get(worker_key("worker-0"))
    assert entry is not None
    record = decode_record(entry.value, WorkerRecord)
    assert record is not None
    assert (record.session, entry.revision) == (claim.session, claim.revision)


async def test_lease_counts_from_before_the_claim_was_sent() -> None:
    class Slow(MemoryKV):
        async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
            rig.now += 3
            return await super().create(key, value, ttl=ttl)

    rig = Rig()
    rig.kv = Slow(lambda: rig.now)
    rig.now = 50.0
    assert claimed(await rig.claimer().claim()).sent_at == 50.0
