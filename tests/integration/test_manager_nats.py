"""Managers on a real NATS server, in one process: behavior that the simulator's store cannot show."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from heapline.assign import AssignmentConfig, Config, Conflict, Manager, NatsKV, Partition, StaticSource
from heapline.assign.kv import decode_record, encode_record
from heapline.assign.worker_ids import Standing, WorkerRecord, worker_key
from tests.integration.nats_rig import Servers

PARTITIONS = [Partition((f"p{n}",)) for n in range(10)]
EAGER = Config(
    heartbeat_interval=0.02, heartbeat_ttl=5, worker_id_ttl=30, cold_start_window=0.1, planned_scale_window=0.1,
    assignment=AssignmentConfig(rebalance_cooldown=0),
)  # fmt: skip


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with Servers(tmp_path, 1) as servers:
        yield servers.urls[0]


async def end_session(kv: NatsKV, worker: str) -> None:
    """End a worker's session, as a leader would."""
    while True:
        entry = await kv.get(worker_key(worker))
        assert entry is not None
        record = decode_record(entry.value, WorkerRecord)
        assert record is not None
        tombstone = encode_record(WorkerRecord(session=record.session, standing=Standing.ENDED))
        try:
            await kv.update(entry.key, tombstone, entry.revision, ttl=30)
        except Conflict:
            continue  # it has just renewed
        return


async def test_every_lost_session_is_followed_by_a_new_one(url: str) -> None:
    """Found with a pool of processes: a resumed worker never began a new session.

    The answer to a request arrived together with the cancellation of the task that waited for it, and the cancellation
    was lost.
    """
    chance = random.Random(1)
    async with await NatsKV.connect(url) as kv, await NatsKV.connect(url) as other:
        managers = [Manager(EAGER, kv, StaticSource(PARTITIONS)) for _ in range(4)]
        await asyncio.gather(*(manager.start() for manager in managers))
        for _ in range(120):
            manager = chance.choice(managers)
            assert manager._member is not None
            session = manager._member.session
            await end_session(other, manager.worker_id)
            async with asyncio.timeout(20):
                while manager._member.session == session:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
        for manager in managers:
            await manager.stop()
