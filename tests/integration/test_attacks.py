"""Attacks with wrong keys and keys out of scope, and leaks of secrets: on a real server over real sockets."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from heapline.contract.batches import Share
from heapline.contract.call import BY_RPC, Right
from heapline.contract.columns import pack
from heapline.contract.errors import HeaplineError, PermissionDenied, ResourceExhausted, Unauthenticated
from heapline.contract.groups import EARLIEST
from heapline.contract.leases import LeaseKeys
from heapline.contract.message import DlqFilter
from heapline.contract.messages import EnqueueBatch, NewMessages
from heapline.server.auth.keys import ALL_KEYS, BY_KEY
from heapline.server.auth.secret import Secret, new_key
from heapline.wire.descriptors import METHODS, pb
from heapline.wire.protobuf import request_of
from tests.conformance.worlds import picture
from tests.integration.guarded_rig import EMAIL, GuardedRig
from tests.integration.server_rig import Requests, pop_start
from tests.unit.server.auth.rig import PASSWORD


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[GuardedRig]:
    async with GuardedRig(tmp_path) as rig:
        yield rig


# -- wrong keys --------------------------------------------------------------------------------------------------------


async def attack(rig: GuardedRig, keys: list[str]) -> list[str]:
    """Send each on one of the interfaces, all together; return how each was refused."""

    async def grpc(key: str) -> str:
        async with rig.as_(key) as broker:
            try:
                await broker.list_topics()
            except (Unauthenticated, ResourceExhausted) as error:
                return type(error).__name__
        return "let in"

    async def http(key: str) -> str:
        response = await rig.ask("GET", "/v1/heaps", key)
        return str(response.json()["error"]) if response.status_code in (401, 429) else "let in"

    return await asyncio.gather(*((grpc if i % 2 else http)(key) for i, key in enumerate(keys)))


@pytest.mark.parametrize("of_one_id", [True, False])
async def test_wrong_keys_cost_little_and_valid_keys_keep_working(rig: GuardedRig, of_one_id: bool) -> None:
    key_id, good = rig.key("*:produce,consume")
    async with rig.as_(good) as worker:
        await worker.enqueue("jobs", b"before")
        rig.hasher.verified.clear()
        wrong = [f"hl_{key_id}_{secrets.token_urlsafe(32)}" if of_one_id else new_key()[1].reveal() for _ in range(100)]
        attacking = asyncio.ensure_future(attack(rig, wrong))
        while not attacking.done():
            await worker.enqueue("jobs", b"during")
        assert set(await attacking) == {"Unauthenticated", "ResourceExhausted"}
        assert len(rig.hasher.verified) <= (BY_KEY if of_one_id else ALL_KEYS).burst
        await worker.enqueue("jobs", b"after")
        assert (await rig.ask("GET", "/v1/heaps", good)).status_code == 200


async def test_one_wrong_key_in_a_loop_costs_one_hash(rig: GuardedRig) -> None:
    wrong = new_key()[1].reveal()
    for _ in range(20):
        assert await attack(rig, [wrong]) == ["Unauthenticated"]
    assert len(rig.hasher.verified) == 1


@pytest.mark.parametrize(
    "credential", ["hl_x", "Bearer", "a.b.c", "", "x" * 5000, "Basic YTpi", "hl_" + "0" * 16 + "_"]
)
async def test_malformed_credential_is_rejected_without_hashing(rig: GuardedRig, credential: str) -> None:
    async with rig.as_(credential) as broker:
        with pytest.raises(Unauthenticated):
            await broker.list_topics()
    response = await rig.http.get("/v1/heaps", headers={"authorization": credential})
    assert response.status_code == 401
    assert rig.hasher.verified == []


# -- out of scope ------------------------------------------------------------------------------------------------------


def command_for(name: str, topic: str) -> Any:
    """Return a command that passes its checks, so that only its rights remain to be checked."""
    keys = LeaseKeys(pack([1]), pack([1]))
    own = {
        "PrepareBatch": {"shares": [Share(topic, NewMessages([b"x"]))]},
        "CreateSchedule": {"name": topic, "every": 60.0},
        "Reschedule": {"delay": 1.0},
        "DlqDelete": {"where": DlqFilter()},
        "UpdateUser": {"disabled": True},
        "EndLeases": {"ids": ["1"]},
        "RecordAudit": {"until": datetime(2026, 1, 31, tzinfo=UTC)},
        "SearchMessages": {"text": "x"},
        "EnqueueBatch": {"messages": NewMessages([b"x"])},
    }
    plain = {
        "topic": topic, "payload": b"x", "message_id": "1", "leases": keys, "seconds": 1.0, "producer_id": "p",
        "batch_id": "b", "part": "p", "parts": ["p"], "group": "g", "member": "m", "session": "s", "rows": [],
        "to": EARLIEST, "checkpoint": "c", "positions": {0: 0}, "start_unit": 0, "end_unit": 1, "incarnation": 1,
        "partition": 0, "throttled": False, "name": topic, "key_id": "k", "email": "a@b.org",
        "password": PASSWORD, "scopes": ["jobs:consume"],
    }  # fmt: skip
    kind = BY_RPC[name]
    if name == "ReadRecords":
        plain["positions"] = pack([0])
    required = [f.name for f in msgspec.structs.fields(kind) if f.required]
    return kind(**{name: plain[name] for name in required if name in plain} | own.get(name, {}))


def request_for(name: str, topic: str) -> Any:
    if name == "PopStream":
        return Requests(pop_start(topic, credits=1))
    if name == "EnqueueStream":
        return Requests(request_of(EnqueueBatch).pack(EnqueueBatch(topic, NewMessages([b"x"]))))
    if name == "Subscribe":
        opened = pb.GroupFetchRequest(topic=topic, group="g", member="m", session="s")
        return Requests(pb.SubscribeRequest(open=opened))
    return request_of(BY_RPC[name]).pack(command_for(name, topic))


async def call(rig: GuardedRig, credential: str, name: str, topic: str = "jobs") -> None:
    async with rig.as_(credential) as broker:
        if METHODS[name].streams_out:
            async for _ in broker.calls.stream(name, request_for(name, topic)):
                break
        else:
            await broker.calls(name, request_for(name, topic))


def needed_for(name: str) -> Right:
    """The first right that is checked."""
    streams = {"EnqueueStream": Right.PRODUCE, "PopStream": Right.CONSUME, "Subscribe": Right.CONSUME}
    right = streams.get(name) or BY_RPC[name].facts.needs[0].right
    assert right is not None
    return right


#: Calls that need a second right: see test_replay_interfaces.py and test_schedule_rights.py.
ALSO = {"StartReplay": ",produce", "CreateSchedule": ",produce"}
#: Calls without a fixed right: they filter their rows, look up their target, or need any right.
UNSCOPED = {
    "ListHeaps",
    "ListStats",
    "GetHeap",
    "ListSchedules",
    "ListReplays",
    "GetReplay",
    "CancelReplay",
    "Describe",
    "ListWorkers",
}
#: Session checks each of its calls: see test_grpc_session.py.
SCOPED = sorted(set(METHODS) - UNSCOPED)


def test_calls_without_a_fixed_right_are_listed() -> None:
    special = {rpc for rpc, kind in BY_RPC.items() if kind.facts.lookup or not any(a.right for a in kind.facts.needs)}
    assert special == UNSCOPED


@pytest.mark.parametrize("name", SCOPED)
async def test_key_out_of_scope_is_refused_by_every_method_and_changes_nothing(rig: GuardedRig, name: str) -> None:
    needed = needed_for(name)
    others = ",".join(right.value for right in Right if right is not needed)
    keys = [rig.key(f"jobs:{others}")[1], rig.key("other:produce,consume,admin", "job*s2:produce,consume,admin")[1]]
    await rig.behind.enqueue("jobs", b"x")
    before = await picture(rig.behind)
    for key in keys:
        with pytest.raises(PermissionDenied) as caught:
            await call(rig, key, name)
        assert caught.value.action == needed.value
    assert await picture(rig.behind) == before
    assert [info.name for info in await rig.behind.list_topics()] == ["jobs"]
    assert await rig.behind.list_batches() == []
    # Control: these refusals were due to the scope alone.
    _, in_scope = rig.key(f"*:{needed.value}{ALSO.get(name, '')}")
    try:
        await asyncio.wait_for(call(rig, in_scope, name), 10)
    except (PermissionDenied, Unauthenticated) as error:
        if name not in ("CreateKey", "CreateUser"):  # which grant a right that this key does not have
            pytest.fail(f"{name} is refused to a key that has the right: {error}")
    except HeaplineError:
        pass  # the request itself is not valid


async def test_list_shows_only_topics_the_caller_has_rights_on(rig: GuardedRig) -> None:
    await rig.behind.create_topic("secret", **rig.small)
    _, key = rig.key("jobs:consume")
    async with rig.as_(key) as broker:
        assert [info.name for info in await broker.list_topics()] == ["jobs"]
        assert [stats.topic for stats in await broker.list_stats()] == ["jobs"]
    assert [heap["name"] for heap in (await rig.ask("GET", "/v1/heaps", key)).json()["items"]] == ["jobs"]


# -- leaks of secrets --------------------------------------------------------------------------------------------------


async def test_no_secret_and_no_payload_is_logged_whatever_is_called(
    rig: GuardedRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("httpcore", "httpx", "hpack", "asyncio"):  # the test's own client, which logs everything it sends
        caplog.set_level(logging.WARNING, logger=name)
    payload, wrong = b"the payload is swordfish", new_key()[1].reveal()
    token = await rig.token()
    async with rig.as_(rig.admin_key) as broker:
        await broker.enqueue("jobs", payload)
        (message,) = await broker.pop("jobs")
        await broker.nack(message, reason="no")
        await broker.purge("jobs")
    made = await rig.ask("POST", "/v1/keys", token, json={"name": "k", "scopes": ["jobs:consume"]})
    await attack(rig, [wrong, wrong, token + "x", token + "x"])
    with pytest.raises(Unauthenticated):
        await rig.guard.login(EMAIL, Secret("a wrong password"))
    rig.behind.do = None  # type: ignore[method-assign, assignment]
    async with rig.as_(rig.admin_key) as broker:
        with pytest.raises(HeaplineError):
            await broker.stats("jobs")  # a traceback in the log
    await rig.server.audit.close()
    assert "call failed" in caplog.text
    seen = caplog.text + (rig.directory / "audit.jsonl").read_text()
    for secret in (rig.admin_key, made.json()["secret"], wrong):
        assert secret.split("_", 2)[2] not in seen
    for secret in (token, PASSWORD, "a wrong password", payload.decode()):
        assert secret not in seen
