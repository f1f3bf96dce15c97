"""Which id a worker gets, and when it may have it."""

from __future__ import annotations

import itertools

import pytest

from heapline.assign.claiming import Claim, Claimer
from heapline.assign.config import Config
from heapline.assign.errors import ConnectionLost
from heapline.assign.memory_kv import MemoryKV
from heapline.assign.records import Standing, WorkerRecord, decode, encode, worker_key

CONFIG = Config(worker_id_max=2)


class Place:
    def __init__(self) -> None:
        self.now = 0.0
        self.kv = MemoryKV(lambda: self.now)
        self._numbers = itertools.count(1)

    def claimer(self) -> Claimer:
        return Claimer(self.kv, CONFIG, lambda: self.now, lambda: f"s{next(self._numbers)}")

    async def put(self, worker: str, record: WorkerRecord) -> int:
        entry = await self.kv.get(worker_key(worker))
        if entry is None:
            return await self.kv.create(worker_key(worker), encode(record))
        return await self.kv.update(worker_key(worker), encode(record), entry.revision)


def claimed(claim: Claim | None) -> Claim:
    assert claim is not None
    return claim


async def test_ids_are_given_from_the_lowest() -> None:
    place = Place()
    claims = [claimed(await place.claimer().claim()) for _ in range(3)]
    assert [claim.worker for claim in claims] == ["worker-0", "worker-1", "worker-2"]
    assert len({claim.session for claim in claims}) == 3
    assert await place.claimer().claim() is None


async def test_released_id_is_free_at_once_and_preferred_to_a_lower_one() -> None:
    place = Place()
    await place.put("worker-2", WorkerRecord(session="old", standing=Standing.RELEASED))
    claim = claimed(await place.claimer().claim())
    assert (claim.worker, claim.follows) == ("worker-2", "old")


async def test_last_released_id_comes_first() -> None:
    place = Place()
    await place.put("worker-2", WorkerRecord(session="x", standing=Standing.RELEASED))
    await place.put("worker-1", WorkerRecord(session="y", standing=Standing.RELEASED))
    assert claimed(await place.claimer().claim()).worker == "worker-1"


@pytest.mark.parametrize("standing", [Standing.ENDED, Standing.BARRED])
async def test_id_of_a_crashed_worker_is_kept_for_worker_id_ttl_as_seen(standing: Standing) -> None:
    place, old = Place(), WorkerRecord(session="old", standing=standing)
    for worker in ("worker-0", "worker-1", "worker-2"):
        await place.put(worker, old)
    claimer = place.claimer()
    assert await claimer.claim() is None
    place.now = 29.9
    assert await claimer.claim() is None
    place.now = 30.0
    claim = claimed(await claimer.claim())
    assert claim.follows == ("old" if standing is Standing.ENDED else "")


async def test_worker_that_was_cut_off_takes_its_own_id_back_at_once() -> None:
    place = Place()
    await place.put("worker-1", WorkerRecord(session="mine", standing=Standing.ENDED))
    assert claimed(await place.claimer().claim("worker-1")).worker == "worker-1"


async def test_worker_whose_id_somebody_else_has_takes_another() -> None:
    place = Place()
    await place.put("worker-0", WorkerRecord(session="other"))
    assert claimed(await place.claimer().claim("worker-0")).worker == "worker-1"


async def test_claim_that_was_not_answered_is_found_by_the_next_pass() -> None:
    class Lossy(MemoryKV):
        async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
            await super().create(key, value, ttl=ttl)
            raise ConnectionLost("no answer")

    place = Place()
    place.kv = Lossy(lambda: place.now)
    claimer = place.claimer()
    with pytest.raises(ConnectionLost):
        await claimer.claim()
    claim = claimed(await claimer.claim())
    assert claim.worker == "worker-0"
    entry = await place.kv.get(worker_key("worker-0"))
    assert entry is not None
    record = decode(entry.value, WorkerRecord)
    assert record is not None
    assert (record.session, entry.revision) == (claim.session, claim.revision)


async def test_lease_counts_from_before_the_claim_was_sent() -> None:
    class Slow(MemoryKV):
        async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
            place.now += 3
            return await super().create(key, value, ttl=ttl)

    place = Place()
    place.kv = Slow(lambda: place.now)
    place.now = 50.0
    assert claimed(await place.claimer().claim()).sent_at == 50.0
