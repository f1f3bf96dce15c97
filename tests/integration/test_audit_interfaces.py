"""The audit log of a real server: calls on every interface and by the command line, without secrets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from heapline.cli.auth import open_auth
from heapline.contract.errors import ConfirmationNeeded, HeaplineError, PermissionDenied, Unauthenticated
from heapline.contract.message import DlqFilter
from heapline.server.auth.secret import Secret
from heapline.wire.descriptors import pb
from tests.integration.guarded_rig import EMAIL, GuardedRig
from tests.unit.server.auth.rig import PASSWORD

PAYLOAD = b"the payload is swordfish"


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[GuardedRig]:
    async with GuardedRig(tmp_path) as rig:
        yield rig


async def lines(rig: GuardedRig) -> list[dict[str, Any]]:
    await rig.server.audit.close()
    return [msgspec.json.decode(line) for line in (rig.directory / "audit.jsonl").read_bytes().splitlines()]


async def test_admin_calls_are_audited_without_payloads_or_secrets(rig: GuardedRig) -> None:
    async with rig.as_(rig.admin_key) as admin:
        await admin.create_topic("orders", **rig.small)
        await admin.update_topic("orders", max_retries_default=7)
        await admin.enqueue("orders", PAYLOAD)
        await admin.bury(await admin.pop("orders"))
        await admin.dlq_replay("orders", where=DlqFilter())
        await admin.bury(await admin.pop("orders"))
        await admin.dlq_delete("orders", where=DlqFilter())
        await admin.enqueue("orders", PAYLOAD)
        await admin.purge("orders")
        await admin.pause_topic("orders")
        await admin.resume_topic("orders")
        await admin.set_partition_throttled("orders", 0, True, "why")
        await admin.snapshot("orders")
        await admin.delete_topic("orders")
    made = await rig.ask("POST", "/v1/keys", json={"name": "k", "scopes": ["jobs:consume"]})
    key = made.json()["key"]
    await rig.confirm("DELETE", f"/v1/keys/{key['id']}")
    who = f"key:{rig.admin_key.split('_')[1]}"
    found = await lines(rig)
    assert {line["who"] for line in found} == {who}
    assert [(line["call"], line["topic"], line["outcome"]) for line in found] == [
        ("MakeHeap", "orders", "ok"), ("UpdateHeapConfig", "orders", "ok"), ("DlqReplay", "orders", "ok"),
        ("DlqDelete", "orders", "ConfirmationNeeded"), ("DlqDelete", "orders", "ok"),
        ("Purge", "orders", "ConfirmationNeeded"), ("Purge", "orders", "ok"), ("Pause", "orders", "ok"),
        ("Resume", "orders", "ok"), ("SetPartitionThrottled", "orders", "ok"), ("Snapshot", "orders", "ok"),
        ("DeleteHeap", "orders", "ConfirmationNeeded"), ("DeleteHeap", "orders", "ok"),
        ("CreateKey", "", "ok"), ("RevokeKey", "", "ConfirmationNeeded"), ("RevokeKey", "", "ok"),
    ]  # fmt: skip
    assert [line["count"] for line in found if line["call"] in ("Purge", "DlqReplay")] == [1, 0, 1]
    assert [line["about"] for line in found][-3:] == [key["id"]] * 3
    assert all(line["correlation_id"] for line in found)
    written = (rig.directory / "audit.jsonl").read_text()
    for secret in (PAYLOAD.decode(), rig.admin_key.split("_", 2)[2], made.json()["secret"].split("_", 2)[2]):
        assert secret not in written
    assert (rig.directory / "audit.jsonl").stat().st_mode & 0o777 == 0o600


async def test_rejections_are_audited_with_caller_and_correlation_id(rig: GuardedRig) -> None:
    key_id, worker = rig.key("jobs:consume")
    headers = {"authorization": f"Bearer {worker}", "x-correlation-id": "seen-by-the-caller"}
    assert (await rig.http.post("/v1/heaps", json={"topic": "x"}, headers=headers)).status_code == 403
    assert (await rig.ask("GET", "/v1/heaps", "hl_wrong")).status_code == 401
    async with rig.as_(worker) as broker:
        with pytest.raises(HeaplineError):
            await broker.enqueue("jobs", PAYLOAD)
    async with rig.as_(rig.admin_key) as admin:
        with pytest.raises(ConfirmationNeeded):
            await admin.calls("Purge", pb.PurgeRequest(topic="jobs"))
    found = await lines(rig)
    assert [(line["who"], line["call"], line["outcome"]) for line in found] == [
        (f"key:{key_id}", "MakeHeap", "PermissionDenied"),
        ("unknown", "ListHeaps", "Unauthenticated"),
        (f"key:{key_id}", "Enqueue", "PermissionDenied"),
        (f"key:{rig.admin_key.split('_')[1]}", "Purge", "ConfirmationNeeded"),
    ]
    assert found[0]["correlation_id"] == "seen-by-the-caller"


async def test_logins_are_audited_without_passwords(rig: GuardedRig) -> None:
    await rig.token()
    with contextlib.suppress(Unauthenticated):
        await rig.guard.login(EMAIL, Secret("a wrong password"))
    assert [(line["call"], line["about"], line["outcome"]) for line in await lines(rig)] == [
        ("Login", EMAIL, "ok"),
        ("Login", EMAIL, "Unauthenticated"),
    ]
    written = (rig.directory / "audit.jsonl").read_text()
    assert PASSWORD not in written
    assert "a wrong password" not in written


async def test_interrupted_login_is_audited_as_cancelled(rig: GuardedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.token()
    go = threading.Event()
    monkeypatch.setattr(rig.hasher, "verify", lambda stored, secret: go.wait(10))
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await rig.guard.login(EMAIL, Secret(PASSWORD))
    finally:
        go.set()
    assert [line["outcome"] for line in await lines(rig)] == ["ok", "CancelledError"]


async def test_command_line_and_server_write_to_the_same_audit_log(rig: GuardedRig) -> None:
    async with rig.as_(rig.admin_key) as admin:
        await admin.create_topic("orders", **rig.small)
    beside = open_auth(rig.directory)
    with beside.audited("keys.create") as about:
        about(beside.keys.create("k", ["jobs:consume"])[0].id)
    found = [(line["who"], line["call"]) for line in await lines(rig)]
    assert sorted(found) == [(f"key:{rig.admin_key.split('_')[1]}", "MakeHeap"), ("local", "keys.create")]


async def test_admins_read_the_audit_log_and_others_do_not(rig: GuardedRig) -> None:
    async with rig.as_(rig.admin_key) as admin:
        await admin.create_topic("orders", **rig.small)
        await admin.pause_topic("orders")
        await lines(rig)  # waits until the lines are written
        page = await admin.read_audit(limit=1)
        (newest,) = page.items
        assert (newest.call, newest.topic, newest.outcome) == ("Pause", "orders", "ok")
        (older,) = (await admin.read_audit(limit=1, cursor=page.cursor)).items
        assert older.call == "MakeHeap"
    over_http = (await rig.ask("GET", "/v1/audit?limit=2")).json()
    assert [line["call"] for line in over_http["items"]] == ["Pause", "MakeHeap"]
    _, key = rig.key("orders:produce,consume,admin")  # an administrator of one topic only
    async with rig.as_(key) as other:
        with pytest.raises(PermissionDenied):
            await other.read_audit()
    assert (await rig.ask("GET", "/v1/audit", key)).status_code == 403
