"""Rights on schedules of a real server, on every interface, and their lines in the audit log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from heapline.contract.errors import PayloadTooLarge, PermissionDenied
from tests.integration.guarded_rig import GuardedRig

PAYLOAD = b"the payload is swordfish"


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[GuardedRig]:
    async with GuardedRig(tmp_path) as rig:
        await rig.behind.create_topic("shop/jobs", **rig.small)
        await rig.behind.create_schedule("shop/theirs", every=60, topic="shop/jobs", payload=PAYLOAD)
        yield rig


async def denied(rig: GuardedRig, key: str, method: str, path: str, **options: Any) -> None:
    answer = await rig.ask(method, path, key, **options)
    assert answer.status_code == 403
    assert answer.json()["error"] == "PermissionDenied"
    assert "swordfish" not in answer.text


@pytest.mark.parametrize("scopes", [("shop/*:produce,consume",), ("jobs:admin", "*:produce"), ("shop/jobs:admin",)])
async def test_schedule_requires_the_admin_right_on_its_name(rig: GuardedRig, scopes: tuple[str, ...]) -> None:
    _, key = rig.key(*scopes)
    async with rig.as_(key) as hl:
        for name in ("shop/theirs", "shop/not-there"):
            for call in (hl.get_schedule, hl.pause_schedule, hl.resume_schedule, hl.delete_schedule):
                with pytest.raises(PermissionDenied):
                    await call(name)
            with pytest.raises(PermissionDenied):
                await hl.create_schedule(name, every=60, topic="shop/jobs")
        assert await hl.list_schedules() == []
    for method, path in (("GET", ""), ("DELETE", "?force=true"), ("POST", ":pause"), ("POST", ":resume")):
        await denied(rig, key, method, f"/v1/schedules/shop/theirs{path}")
    await denied(rig, key, "POST", "/v1/schedules", json={"name": "shop/theirs", "topic": "shop/jobs", "every": 60})
    assert (await rig.ask("GET", "/v1/schedules", key)).json() == {"items": []}
    assert (await rig.behind.get_schedule("shop/theirs")).payload == PAYLOAD


async def test_schedule_requires_the_produce_right_on_its_topic(rig: GuardedRig) -> None:
    _, key = rig.key("shop/*:admin", "jobs:produce")
    async with rig.as_(key) as hl:
        with pytest.raises(PermissionDenied):
            await hl.create_schedule("shop/mine", every=60, topic="shop/jobs")
        with pytest.raises(PermissionDenied):
            await hl.create_schedule("shop/theirs", every=60, topic="shop/jobs", payload=b"mine")
        assert (await hl.create_schedule("shop/mine", every=60, topic="jobs")).topic == "jobs"
        assert [info.name for info in await hl.list_schedules()] == ["shop/mine", "shop/theirs"]
        assert (await hl.pause_schedule("shop/theirs")).state == "paused"


async def test_changes_are_audited_with_the_schedule_s_name_and_without_payloads(rig: GuardedRig) -> None:
    async with rig.as_(rig.admin_key) as admin:
        await admin.create_schedule("nightly", cron="0 3 * * *", topic="jobs", payload=PAYLOAD)
        await admin.get_schedule("nightly")
        await admin.list_schedules()
        await admin.pause_schedule("nightly")
    await rig.ask("POST", "/v1/schedules/nightly:resume")
    await rig.confirm("DELETE", "/v1/schedules/nightly")
    _, key = rig.key("jobs:produce")
    await rig.ask("DELETE", "/v1/schedules/shop/theirs?force=true", key)
    await rig.server.audit.close()
    text = (rig.directory / "audit.jsonl").read_text()
    found = [msgspec.json.decode(line) for line in text.splitlines()]
    mine = [(line["call"], line["topic"], line["about"], line["outcome"]) for line in found if "Sched" in line["call"]]
    assert mine == [
        ("CreateSchedule", "jobs", "nightly", "ok"),
        ("PauseSchedule", "", "nightly", "ok"),
        ("ResumeSchedule", "", "nightly", "ok"),
        ("DeleteSchedule", "", "nightly", "ConfirmationNeeded"),
        ("DeleteSchedule", "", "nightly", "ok"),
        ("DeleteSchedule", "", "shop/theirs", "PermissionDenied"),
    ]
    assert "swordfish" not in text


async def test_server_s_payload_limit_applies_to_schedules(tmp_path: Path) -> None:
    async with GuardedRig(tmp_path, payload_bytes_max=100) as rig, rig.as_(rig.admin_key) as admin:
        with pytest.raises(PayloadTooLarge):
            await admin.create_schedule("a", every=60, topic="jobs", payload=bytes(101))
        body = {"name": "a", "topic": "jobs", "every": 60, "payload_text": "x" * 101}
        assert (await rig.ask("POST", "/v1/schedules", json=body)).status_code == 413
        assert await admin.list_schedules() == []


async def test_http_accepts_and_returns_payloads_as_text_and_json(rig: GuardedRig) -> None:
    body = {"name": "a", "topic": "jobs", "cron": "@hourly", "payload_json": {"order": 7}}
    made = await rig.ask("POST", "/v1/schedules", json=body)
    assert made.status_code == 201
    shown = (await rig.ask("GET", "/v1/schedules/a?payload_as=json")).json()
    assert (shown["payload_json"], shown["state"], shown["tz"]) == ({"order": 7}, "active", "UTC")
    twice = await rig.ask("POST", "/v1/schedules", json=body | {"payload_text": "x"})
    assert (twice.status_code, twice.json()["error"]) == (400, "BadRequest")
    unknown = await rig.ask("POST", "/v1/schedules", json=body | {"evry": 60})
    assert (unknown.status_code, "evry" in unknown.json()["text"]) == (400, True)
    page = (await rig.ask("GET", "/v1/schedules?limit=1")).json()
    assert [one["name"] for one in page["items"]] == ["a"]
    rest = (await rig.ask("GET", "/v1/schedules", params={"cursor": page["cursor"]})).json()
    assert ([one["name"] for one in rest["items"]], "cursor" in rest) == (["shop/theirs"], False)


async def test_schedule_pages_hide_schedules_of_other_callers(rig: GuardedRig) -> None:
    for name in ("a/1", "a/2", "b/mine", "c/1", "c/2", "d/mine", "e/1"):
        await rig.behind.create_schedule(name, every=60, topic="shop/jobs")
    _, key = rig.key("b/*:admin", "d/*:admin")
    found, query, texts = [], {"limit": 1}, []
    while query is not None:
        answer = await rig.ask("GET", "/v1/schedules", key, params=query)
        texts.append(answer.text)
        found += [reported["name"] for reported in answer.json()["items"]]
        cursor = answer.json().get("cursor")
        query = None if cursor is None else {"limit": 1, "cursor": cursor}
    assert found == ["b/mine", "d/mine"]
    assert not any(f"{other}/" in text for text in texts for other in "ace")
