"""Replays on a guarded server: rights, audit, broken connections, and errors for callers without rights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from heapline.contract.errors import BadRequest, PermissionDenied, ReplayNotFound
from heapline.contract.replays import SaveCheckpoint
from heapline.wire.descriptors import pb
from tests.integration.guarded_rig import GuardedRig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[GuardedRig]:
    async with GuardedRig(tmp_path) as rig:
        await rig.behind.create_topic("other", **rig.small)
        for number in range(3):
            await rig.behind.enqueue("jobs", b"%d" % number)
        yield rig


async def ended(hl: Any, name: str) -> Any:
    async with asyncio.timeout(30):
        while (info := await hl.get_replay(name)).state == "running":  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return info


async def test_reading_needs_consume_and_starting_needs_admin_and_produce(rig: GuardedRig) -> None:
    _, reader = rig.key("jobs:consume")
    _, admin = rig.key("jobs:consume,admin")
    _, both = rig.key("jobs:consume,admin", "other:produce")
    _, stranger = rig.key("other:consume,produce,admin")
    async with rig.as_(reader) as hl:
        assert [row.payload async for row in hl.replay("jobs", checkpoint="c")] == [b"0", b"1", b"2"]
        with pytest.raises(PermissionDenied):
            await hl.start_replay("r", "jobs")
    async with rig.as_(admin) as hl:
        with pytest.raises(PermissionDenied):
            await hl.start_replay("r", "jobs", into="other")
    async with rig.as_(both) as hl:
        await hl.start_replay("r", "jobs", into="other")
        assert (await ended(hl, "r")).replayed == 3
    async with rig.as_(reader) as hl:
        assert [info.name for info in await hl.list_replays()] == ["r"]
        assert (await hl.get_replay("r")).state == "done"
        with pytest.raises(PermissionDenied):
            await hl.cancel_replay("r")
    async with rig.as_(stranger) as hl:
        assert await hl.list_replays() == []
        for call in (hl.get_replay, hl.cancel_replay):
            with pytest.raises(ReplayNotFound):
                await call("r")
        with pytest.raises(PermissionDenied):
            [row async for row in hl.replay("jobs")]
        with pytest.raises(PermissionDenied):
            await hl.do(SaveCheckpoint("jobs", "c", {0: 0}))


async def test_starting_and_cancelling_a_replay_are_audited(rig: GuardedRig) -> None:
    async with rig.as_(rig.admin_key) as hl:
        await hl.start_replay("r", "jobs", into="other", rate=0.001)
        await hl.cancel_replay("r")
    asked = {"name": "s", "topic": "jobs", "into": "other", "start": {"0": 1}, "where": {"priority_min": 0}}
    assert (await rig.ask("POST", "/v1/replays", json=asked)).status_code == 200
    assert (await rig.ask("POST", "/v1/replays/s:cancel")).status_code == 200
    await rig.server.audit.close()
    lines = [msgspec.json.decode(line) for line in (rig.directory / "audit.jsonl").read_bytes().splitlines()]
    assert [(line["call"], line["topic"], line["about"]) for line in lines] == [
        ("StartReplay", "jobs", "name=r, target=other"), ("CancelReplay", "jobs", "r"),
        ("StartReplay", "jobs", "name=s, target=other"), ("CancelReplay", "jobs", "s"),
    ]  # fmt: skip


async def test_http_reads_lines_and_saves_checkpoints(rig: GuardedRig) -> None:
    asked = {"topic": "jobs", "checkpoint": "c", "payload_as": "text"}
    answer = await rig.ask("POST", "/v1/replays:read", json=asked)
    lines = [msgspec.json.decode(line) for line in answer.content.splitlines()]
    assert lines[0] == {"topic": "jobs", "rows": [], "positions": {"0": 0}, "ends": {"0": 3}}
    rows = [row for line in lines for row in line["rows"]]
    assert [(row["offset"], row["payload_text"]) for row in rows] == [(0, "0"), (1, "1"), (2, "2")]
    kept = await rig.ask("POST", "/v1/replays:keep", json={"topic": "jobs", "checkpoint": "c", "positions": {"0": 2}})
    assert kept.json() == {"done": True}
    again = await rig.ask("POST", "/v1/replays:read", json=asked)
    assert [row["payload_text"] for line in again.text.splitlines() for row in msgspec.json.decode(line)["rows"]] == [
        "2"
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/replays:read", {"topic": "jobs", "start": "never"}),
        ("/v1/replays:read", {"topic": "jobs", "start": {"x": 1}}),
        ("/v1/replays:read", {"topic": "jobs", "start": "2030-01-31T12:00:00"}),
        ("/v1/replays:read", {"topic": "jobs", "partitions": [7]}),
        ("/v1/replays:read", {"topic": "jobs", "mode": "slow"}),
        ("/v1/replays:keep", {"topic": "jobs", "checkpoint": "c", "positions": {"9": 1}}),
        ("/v1/replays", {"name": "a b", "topic": "jobs"}),
        ("/v1/replays", {"name": "a", "topic": "jobs", "delay": 1, "keep_due": True}),
    ],
)
async def test_http_rejects_invalid_replay_requests(rig: GuardedRig, path: str, body: dict[str, Any]) -> None:
    answer = await rig.ask("POST", path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"] in ("BadRequest", "BadName")


async def test_grpc_rejects_a_malformed_position(rig: GuardedRig) -> None:
    async with rig.as_(rig.admin_key) as hl:
        for place in (pb.Position(), pb.Position(at_us=1 << 62), pb.Position(edge="middle")):
            with pytest.raises(BadRequest):
                [_ async for _ in hl.calls.stream("Replay", pb.ReplayRequest(topic="jobs", start=place))]
