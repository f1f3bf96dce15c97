"""Groups on a real server: rights, confirmations, limits, broken connections, and slow members."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

import heapline
from heapline.contract.errors import (
    ConfirmationNeeded,
    MemberReplaced,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from heapline.contract.groups import PartitionRows, pack_offsets, unpack_offsets
from heapline.contract.message import Outgoing
from heapline.wire.descriptors import pb
from heapline.wire.protobuf import struct_codec
from tests.integration.guarded_rig import GuardedRig
from tests.integration.http_rig import HttpRig
from tests.integration.proxy import Proxy
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_rig import Keys, Requests, Rig, until

ROWS = struct_codec(PartitionRows, pb.PartitionRows)


def pack_rows(offsets: dict[int, list[int]]) -> list[Any]:
    return [ROWS.pack(share) for share in pack_offsets(offsets)]


def subscribe_open(credits: int = 0, topic: str = "jobs", member: str = "m") -> Any:
    opened = pb.GroupFetchRequest(topic=topic, group="g", member=member, session=f"s-{member}")
    return pb.SubscribeRequest(open=opened, credits=credits)


async def fill(hl: Any, count: int, payload: bytes = b"x") -> None:
    await hl.enqueue_batch("jobs", [Outgoing(payload)] * count)


async def lag(hl: Any) -> int:
    return sum(o.lag for o in await hl.group_offsets("jobs", "g"))


# -- rights ------------------------------------------------------------------------------------------------------------


async def test_consumers_read_and_settle_and_only_administrators_manage_groups(tmp_path: Path) -> None:
    keys = Keys(admin="*:produce,consume,admin", reader="jobs:consume", writer="jobs:produce")
    async with Rig(tmp_path, keys) as rig:
        await rig.behind.create_topic("jobs", **rig.small)
        await rig.behind.create_topic("secrets", **rig.small)
        await fill(rig.behind, 1)
        async with (
            RawGrpc(rig.grpc_target, credential="admin") as admin,
            RawGrpc(rig.grpc_target, credential="reader") as reader,
            RawGrpc(rig.grpc_target, credential="writer") as writer,
        ):
            (batch,) = (await reader.group_fetch("jobs", "g", "m", session="s", wait=5)).batches
            await reader.group_ack("jobs", "g", "m", {0: batch.offsets.tolist()}, session="s")
            assert [info.name for info in await reader.list_groups("jobs")] == ["g"]
            await reader.group_leave("jobs", "g", "m", session="s")
            for call in (
                reader.create_group("jobs", "other"), reader.delete_group("jobs", "g"),
                reader.reset_offsets("jobs", "g", to="earliest"), reader.group_dead_replay("jobs", "g"),
                reader.group_dead_delete("jobs", "g"), reader.list_groups("secrets"),
                reader.group_fetch("secrets", "g", "m", session="s"), writer.list_groups("jobs"),
                writer.group_fetch("jobs", "g", "m", session="s"),
                anext(reader.calls.stream("Subscribe", Requests(subscribe_open(topic="secrets")))),
                anext(writer.calls.stream("Subscribe", Requests(subscribe_open()))),
            ):  # fmt: skip
                with pytest.raises(PermissionDenied):
                    await call
            await admin.create_group("jobs", "other")
            await admin.reset_offsets("jobs", "g", to="earliest")
            assert await lag(admin) == 1


async def test_revoked_key_ends_its_subscription(tmp_path: Path) -> None:
    keys = Keys(reader="jobs:consume")
    async with Rig(tmp_path, keys) as rig:
        await rig.behind.create_topic("jobs", **rig.small)
        async with RawGrpc(rig.grpc_target, credential="reader") as reader:
            stream = reader.calls.stream("Subscribe", Requests(subscribe_open(10)))
            await anext(stream)
            keys.revoked.add("reader")
            rig.server.gate.credentials.check()
            with pytest.raises(Unauthenticated):
                await anext(stream)


# -- confirmations and audit -------------------------------------------------------------------------------------------


async def test_group_deletion_needs_a_confirmation_token_for_that_group(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.behind.create_topic("jobs", **rig.small)
        for group in ("g", "other"):
            await rig.behind.create_group("jobs", group)
        for method, kind in (("GroupDeadDelete", pb.GroupDeadDeleteRequest), ("DeleteGroup", pb.DeleteGroupRequest)):
            with pytest.raises(ConfirmationNeeded) as needed:
                await rig.wire.calls(method, kind(topic="jobs", group="g"))
            token = needed.value.token
            with pytest.raises(ConfirmationNeeded):
                await rig.wire.calls(method, kind(topic="jobs", group="other"), x_confirmation=token)
            await rig.wire.calls(method, kind(topic="jobs", group="g"), x_confirmation=token)
        assert [info.name for info in await rig.behind.list_groups("jobs")] == ["other"]
        await rig.wire.delete_group("jobs", "other")
        assert await rig.behind.list_groups("jobs") == []


async def test_deleting_over_http_needs_force_and_a_token(tmp_path: Path) -> None:
    async with HttpRig(tmp_path) as rig:
        await rig.heap()
        made = await rig.post("heaps/jobs:groups", {"group": "g", "config": {"max_retries": 1}})
        assert (made.status_code, made.json()["config"]["max_retries"]) == (201, 1)
        path = "/v1/heaps/jobs:groups/g"
        assert (await rig.http.delete(path)).status_code == 400
        response = await rig.http.delete(path, params={"force": "true"})
        assert response.status_code == 428
        token = response.json()["facts"]["token"]
        assert (await rig.http.get(path)).status_code == 200
        done = await rig.http.delete(path, params={"force": "true"}, headers={"x-confirmation": token})
        assert done.status_code == 200
        gone = await rig.http.get(path)
        assert (gone.status_code, gone.json()["error"]) == (404, "GroupNotFound")


async def test_administration_of_groups_is_audited(tmp_path: Path) -> None:
    async with GuardedRig(tmp_path) as rig:
        async with rig.as_(rig.admin_key) as admin:
            await admin.create_group("jobs", "g")
            await admin.reset_offsets("jobs", "g", to="latest")
            await admin.group_fetch("jobs", "g", "m", session="s")
            await admin.delete_group("jobs", "g")
        await rig.server.audit.close()
        lines = [msgspec.json.decode(line) for line in (rig.directory / "audit.jsonl").read_bytes().splitlines()]
        assert [(line["call"], line["topic"], line["about"], line["outcome"]) for line in lines] == [
            ("CreateGroup", "jobs", "g", "ok"), ("ResetOffsets", "jobs", "g", "ConfirmationNeeded"),
            ("ResetOffsets", "jobs", "g", "ok"),
            ("DeleteGroup", "jobs", "g", "ConfirmationNeeded"), ("DeleteGroup", "jobs", "g", "ok"),
        ]  # fmt: skip


async def test_subscriptions_count_as_streams_of_their_key(tmp_path: Path) -> None:
    async with GuardedRig(tmp_path, streams_per_key=1) as rig:
        _, key = rig.key("*:consume")
        async with rig.as_(key) as broker:
            first = broker.calls.stream("Subscribe", Requests(subscribe_open(1)))
            await anext(first)
            with pytest.raises(ResourceExhausted, match="open streams"):
                await anext(broker.calls.stream("Subscribe", Requests(subscribe_open(1, member="n"))))


async def test_http_returns_rows_as_json(tmp_path: Path) -> None:
    async with HttpRig(tmp_path) as rig:
        await rig.heap()
        await rig.post("enqueue", {"topic": "jobs", "payload_json": {"order": 7}, "priority": 3, "key": "k"})
        member = {"member": "m", "session": "s"}
        response = await rig.post("heaps/jobs:groups/g:fetch", {**member, "wait": 5, "payload_as": "json"})
        (row,) = response.json()["rows"]
        assert (row["payload_json"], row["partition"], row["attempts"], row["priority"], row["key"]) == (
            {"order": 7}, 0, 1, 3, "k",
        )  # fmt: skip
        rows = {"0": [row["offset"]]}
        assert (await rig.post("heaps/jobs:groups/g:ack", {**member, "rows": rows})).json() == {"lost": {}}
        lost = await rig.post("heaps/jobs:groups/g:ack", {**member, "rows": {"0": [1 << 40]}})
        assert (lost.status_code, lost.json()["error"]) == (409, "DeliveryLost")
        response = await rig.post("heaps/jobs:groups/g:ack", {**member, "rows": {"0": [1 << 40]}, "tell_lost": True})
        assert response.json() == {"lost": {"0": [1 << 40]}}
        (offset,) = (await rig.get("heaps/jobs:groups/g/offsets")).json()["offsets"]
        assert (offset["lag"], offset["member"]) == (0, "m")
        assert (await rig.post("heaps/jobs:groups/g:reset", {"to": "earliest"})).status_code == 400
        needed = await rig.post("heaps/jobs:groups/g:reset?force=true", {"to": "earliest"})
        assert needed.status_code == 428
        reset = {"to": "earliest", "force": True, "confirmation": needed.json()["facts"]["token"]}
        other = await rig.post("heaps/jobs:groups/g:reset", {**reset, "to": "latest"})
        assert other.status_code == 428  # a token is for one position
        assert (await rig.post("heaps/jobs:groups/g:reset", reset)).json()["offsets"][0]["lag"] == 1


async def test_topic_named_groups_is_still_a_heap(tmp_path: Path) -> None:
    async with HttpRig(tmp_path) as rig:
        await rig.heap("billing/groups")
        assert (await rig.http.get("/v1/heaps/billing/groups")).json()["name"] == "billing/groups"
        assert (await rig.http.get("/v1/heaps/billing/groups:groups")).json() == {"items": []}


async def test_acks_nacks_and_leaving_on_the_stream_itself(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.behind.create_topic("jobs", **rig.small)
        await fill(rig.behind, 3)
        requests = Requests(subscribe_open(10))
        stream = rig.wire.calls.stream("Subscribe", requests)
        while not (answer := await anext(stream)).fetched.batches:
            pass
        offsets = [row.offset for row in answer.fetched.batches[0].rows.items]
        acks = pb.Settle(number=1, rows=pack_rows({0: [offsets[0], 1 << 40]}))
        nacks = pb.Settle(number=2, rows=pack_rows({0: [offsets[1]]}), nack=True, reason="no")
        requests.say(pb.SubscribeRequest(settle=[acks, nacks]))
        settled: dict[int, Any] = {}
        while len(settled) < 2:
            settled |= {s.number: s for s in (await anext(stream)).settled}
        assert unpack_offsets([ROWS.unpack(share) for share in settled[1].lost]) == {0: [1 << 40]}
        (response,) = await rig.behind.group_offsets("jobs", "g")
        assert (response.lag, response.outstanding, response.retrying) == (2, 1, 1)
        requests.say(pb.SubscribeRequest(leave=True))
        assert [answer async for answer in stream] == []
        info = await rig.behind.get_group("jobs", "g")
        assert (info.members, info.offsets[0].outstanding) == ({}, 0)


async def test_member_that_left_by_a_call_is_not_rejoined_by_its_stream(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.behind.create_topic("jobs", **rig.small)
        stream = rig.wire.calls.stream("Subscribe", Requests(subscribe_open(10)))
        await anext(stream)
        await rig.wire.group_leave("jobs", "g", "m", session="s-m")
        with pytest.raises(MemberReplaced):
            await anext(stream)
        assert (await rig.behind.get_group("jobs", "g")).members == {}


# -- connections that break --------------------------------------------------------------------------------------------


async def test_cut_subscription_resumes_and_every_row_is_acked(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig, Proxy(rig.target) as proxy:
        await rig.behind.create_topic("jobs", partitions=2, **rig.small)
        await fill(rig.behind, 3000, b"x" * 100)
        seen: Counter[tuple[int, int]] = Counter()
        async with (
            heapline.connect(proxy.target, deadline=20) as hl,
            hl.subscribe("jobs", group="g", member="m", credits=200, batches=True, ack_timeout=5.0) as batches,
            asyncio.timeout(60),
        ):
            ticking = asyncio.ensure_future(tick(rig))
            cuts = 0
            async for batch in batches:
                seen.update((batch.partition, offset) for offset in batch.offsets.tolist())
                if len(seen) > 600 * (cuts + 1):
                    cuts += 1
                    proxy.cut()
                try:
                    await batch.ack()
                except heapline.DeliveryLost:
                    continue
                if len(seen) == 3000 and not await lag(rig.behind):
                    break
            ticking.cancel()
            assert cuts >= 3
            assert (await rig.behind.get_group("jobs", "g")).members.keys() == {"m"}
        assert len(seen) == 3000


async def tick(rig: Rig) -> None:
    """Let time pass faster than real time: rows on a cut connection are redelivered."""
    while True:
        await asyncio.sleep(0.05)
        await rig.advance(0.5)


async def test_ack_with_a_lost_response_is_resent_without_an_error(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig, Proxy(rig.target) as proxy:
        await rig.behind.create_topic("jobs", **rig.small)
        await fill(rig.behind, 3)
        async with heapline.connect(proxy.target, deadline=20) as hl:
            fetched = await hl.group_fetch("jobs", "g", "m", session="s", wait=5)
            offsets = {0: fetched.batches[0].offsets.tolist()}
            for act in (hl.group_ack, hl.group_nack):
                proxy.hold()
                acting = asyncio.ensure_future(act("jobs", "g", "m", offsets, session="s"))
                await asyncio.wait_for(proxy.taken.wait(), 20)
                proxy.cut()
                await asyncio.wait_for(acting, 30)
                if act == hl.group_ack:
                    assert await lag(rig.behind) == 0
                    await rig.behind.reset_offsets("jobs", "g", to="earliest")
                    fetched = await hl.group_fetch("jobs", "g", "m", session="s", wait=5)
            (response,) = await rig.behind.group_offsets("jobs", "g")
            assert response.retrying == 3


async def test_member_with_an_open_stream_stays_without_acks(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.behind.create_topic("jobs", **rig.small)
        await fill(rig.behind, 3)
        await rig.behind.create_group("jobs", "g", member_lease=5.0, ack_timeout=600.0)
        async with RawGrpc(rig.grpc_target) as client:
            stream = client.calls.stream("Subscribe", Requests(subscribe_open(2, member="m")))
            while not (await anext(stream)).fetched.batches:
                pass
            reading = asyncio.ensure_future(read_all(stream))
            for _ in range(6):
                await rig.advance(2)
            assert list((await rig.behind.get_group("jobs", "g")).members) == ["m"]
            reading.cancel()


# -- slow members ------------------------------------------------------------------------------------------------------


async def test_member_that_does_not_read_holds_little_and_slows_only_itself(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig, Proxy(rig.grpc_target) as proxy:
        await rig.behind.create_topic("jobs", **rig.small)
        for _ in range(100):
            await fill(rig.behind, 10, b"x" * 60_000)
        async with RawGrpc(proxy.target) as slow, heapline.connect(rig.target) as quick:
            stream = slow.calls.stream("Subscribe", Requests(subscribe_open(1_000_000, member="slow")))
            await anext(stream)
            proxy.stall()
            reading = asyncio.ensure_future(read_all(stream))
            count = 0
            async with quick.subscribe("jobs", group="other", batches=True) as batches, asyncio.timeout(30):
                async for batch in batches:
                    count += len(batch)
                    await batch.ack()
                    if count == 1000:
                        break
            (response,) = await rig.behind.group_offsets("jobs", "g")
            assert response.outstanding * 60_000 < 16 << 20, "a few batches, not the 60 MB that its credits allow"
            proxy.flow()

            async def all_out() -> bool:
                (response,) = await rig.behind.group_offsets("jobs", "g")
                return response.outstanding == 1000

            await until(all_out)
            reading.cancel()


async def read_all(stream: Any) -> None:
    async for _ in stream:
        pass


# -- blocking code -----------------------------------------------------------------------------------------------------


async def test_blocking_client_iterates_over_rows(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.behind.create_topic("jobs", **rig.small)
        await fill(rig.behind, 10)

        def work() -> tuple[int, int]:
            with heapline.connect_sync(rig.target) as hl:
                count = 0
                with hl.subscribe("jobs", group="g", member="m") as rows:
                    for row in rows:
                        row.ack()
                        count += 1
                        if count == 6:
                            break
                with hl.subscribe("jobs", group="g", member="m", batches=True) as batches:
                    for batch in batches:
                        assert [row.payload for row in batch.messages()] == [b"x"] * len(batch)
                        batches.ack(batch.messages())
                        count += len(batch)
                        if count == 10:
                            break
                return count, hl.get_group("jobs", "g").lag

        async with asyncio.timeout(30):
            assert await asyncio.to_thread(work) == (10, 0)
