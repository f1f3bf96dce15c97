"""Parts sent as columns without results, as Spark sends them, equal any other parts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from heapline.contract.batches import PrepareBatch, Share
from heapline.contract.columns import pack
from heapline.contract.errors import BadRequest, BatchDecided, IdempotencyConflict, PayloadTooLarge, PermissionDenied
from heapline.contract.message import Outgoing
from heapline.contract.messages import pack_messages
from heapline.wire.descriptors import pb
from heapline.wire.protobuf import request_of
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_rig import Keys, Rig

SOON = datetime(2100, 1, 1, 0, 0, 0, 123, tzinfo=UTC)
LONG_AGO = datetime(2001, 1, 1, tzinfo=UTC)
PLAIN = [Outgoing(b"a", 3), Outgoing(b"", -1), Outgoing(b"ccc")]
TIMED = [Outgoing(b"a", 3, deliver_at=SOON), Outgoing(b"b", deliver_at=LONG_AGO), Outgoing(b"c")]
RICH = [Outgoing(b"a", 1, key="k", headers={"n": "1"}, ttl=60.0), Outgoing(b"b", idempotency_key="once")]


def request(part: str, messages: list[Outgoing], topic: str = "jobs") -> Any:
    shares = [Share(topic, pack_messages(messages))]
    return request_of(PrepareBatch).pack(PrepareBatch("b", part, shares, without_results=True))


async def call(rig: Rig, name: str, asked: Any, credential: str | None = None) -> Any:
    async with RawGrpc(rig.grpc_target, credential) as client:
        return await client.calls(name, asked)


async def made(rig: Rig) -> None:
    await rig.broker.create_topic("jobs", segment_bytes=1 << 20, max_payload_bytes=1000, partitions=2)


@pytest.mark.parametrize("messages", [PLAIN, TIMED, RICH], ids=["plain", "timed", "rich"])
async def test_part_without_results_is_the_same_part(tmp_path: Path, messages: list[Outgoing]) -> None:
    async with Rig(tmp_path) as rig:
        await made(rig)
        answer = await call(rig, "PrepareBatch", request("1", messages))
        assert answer == pb.Prepared()
        results = await rig.broker.prepare_batch("b", "1", messages, topic="jobs")
        assert len({result.id for result in results["jobs"]}) == len(messages)
        with pytest.raises(IdempotencyConflict):
            await call(rig, "PrepareBatch", request("1", messages[1:]))
        assert await rig.broker.commit_batch("b", ["1"]) == len(messages)
        with pytest.raises(BatchDecided):
            await call(rig, "PrepareBatch", request("2", messages))
        infos = [await rig.broker.get("jobs", result.id) for result in results["jobs"]]
        assert [(i.payload, i.priority, i.key) for i in infos] == [(m.payload, m.priority, m.key) for m in messages]
        waits = [i.state == "delayed" for i in infos]
        assert waits == [m.deliver_at is SOON for m in messages]
        due = [i.due_at for i in infos if i.state == "delayed"]
        assert all(SOON <= moment < SOON + timedelta(milliseconds=1) for moment in due if moment is not None)


async def test_invalid_part_raises_the_usual_error_and_prepares_nothing(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await made(rig)
        with pytest.raises(PayloadTooLarge):
            await call(rig, "PrepareBatch", request("1", [Outgoing(b"x"), Outgoing(bytes(1001))]))
        past = request("1", [Outgoing(b"x")])
        past.shares[0].messages.deliver_at_ms = bytes(pack([-631_152_000_000]))  # 1950
        with pytest.raises(BadRequest, match="deliver_at"):
            await call(rig, "PrepareBatch", past)
        twice = request("1", PLAIN)
        twice.shares.append(twice.shares[0])
        with pytest.raises(BadRequest, match="twice"):
            await call(rig, "PrepareBatch", twice)
        bad = request("1", PLAIN)
        bad.shares[0].messages.priorities = b"1234567"
        with pytest.raises(BadRequest, match="column priorities must have 24 bytes for 3 rows, got 7"):
            await call(rig, "PrepareBatch", bad)
        assert await rig.broker.list_batches() == []


async def test_part_for_a_topic_outside_the_key_s_scope_is_refused(tmp_path: Path) -> None:
    keys = Keys(admin="*:produce,consume,admin", writer="jobs*:produce")
    async with Rig(tmp_path, keys) as rig:
        await rig.behind.create_topic("secrets", segment_bytes=1 << 20, max_payload_bytes=1000)
        with pytest.raises(PermissionDenied):
            await call(rig, "PrepareBatch", request("1", PLAIN, "secrets"), "writer")
