"""The calls that inspect a queue, on a server: who may make them, and what they never show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from heapline import Outgoing
from tests.integration.guarded_rig import GuardedRig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[GuardedRig]:
    async with GuardedRig(tmp_path) as rig:
        await rig.behind.create_topic("secret", **rig.small)
        for topic in ("jobs", "secret"):
            await rig.behind.enqueue_batch(topic, [Outgoing(b"hidden", headers={"authorization": "hidden"})] * 3)
        yield rig


async def audited(rig: GuardedRig, call: str, count: int) -> list[dict[str, Any]]:
    """The audit lines of a call, newest first, once a thread has written this many."""
    async with asyncio.timeout(20):
        while True:
            lines = (await rig.ask("GET", "/v1/audit")).json()["items"]
            if len(found := [line for line in lines if line["call"] == call]) >= count:
                return found


async def test_series_of_all_topics_need_the_right_on_all(rig: GuardedRig) -> None:
    _, narrow = rig.key("jobs:consume")
    _, wide = rig.key("*:consume")
    own = await rig.ask("GET", "/v1/series?topic=jobs", narrow)
    assert (own.status_code, own.json()["topic"]) == (200, "jobs")
    assert (await rig.ask("GET", "/v1/series?topic=secret", narrow)).status_code == 403
    assert (await rig.ask("GET", "/v1/series", narrow)).status_code == 403
    assert (await rig.ask("GET", "/v1/series", wide)).status_code == 200


async def test_workers_are_shown_for_topics_of_the_caller_only(rig: GuardedRig) -> None:
    for topic in ("jobs", "secret"):
        await rig.behind.pop(topic, 1, holder=f"worker of {topic}")
    _, narrow = rig.key("jobs:consume")
    found = (await rig.ask("GET", "/v1/workers", narrow)).json()
    assert [(row["topic"], row["holder"]) for row in found["items"]] == [("jobs", "worker of jobs")]
    for scope in ("jobs:produce,admin", "other:consume"):
        assert (await rig.ask("GET", "/v1/workers?limit=1", rig.key(scope)[1])).json()["items"] == []


async def test_lease_is_ended_by_an_administrator_only_and_audited(rig: GuardedRig) -> None:
    (message,) = await rig.behind.pop("jobs", 1, holder="w")
    _, consumer = rig.key("jobs:consume,produce")
    admin_id, admin = rig.key("jobs:admin")
    listed = await rig.ask("GET", "/v1/heaps/jobs/leases", consumer)
    assert [row["message_id"] for row in listed.json()["items"]] == [message.message_id]
    assert "token" not in listed.text
    body = {"ids": [message.message_id], "reason": "hangs"}
    assert (await rig.ask("POST", "/v1/heaps/jobs/leases:end", consumer, json=body)).status_code == 403
    assert (await rig.ask("POST", "/v1/heaps/jobs/leases:end", admin, json=body)).json() == {"count": 1}
    ended = await audited(rig, "EndLeases", 2)
    assert [(line["who"], line["outcome"]) for line in ended] == [
        (f"key:{admin_id}", "ok"), (ended[-1]["who"], "PermissionDenied"),
    ]  # fmt: skip
    assert message.message_id in ended[0]["about"]
    assert (ended[0]["topic"], ended[0]["count"]) == ("jobs", 1)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/heaps/secret/explain", "/v1/heaps/secret/leases", "/v1/heaps/secret/history?message_id=1",
        "/v1/heaps/secret/search?text=hidden", "/v1/heaps/secret/due", "/v1/dlq:groups?topic=secret",
        "/v1/dlq:count?topic=secret", "/v1/series?topic=secret",
    ],
)  # fmt: skip
async def test_reading_needs_the_consume_right_on_the_topic(rig: GuardedRig, path: str) -> None:
    for scope in ("jobs:produce,consume,admin", "secret:produce,admin"):
        refused = await rig.ask("GET", path, rig.key(scope)[1])
        assert refused.status_code == 403
        assert "hidden" not in refused.text
    assert (await rig.http.get(path)).status_code == 401
    allowed = await rig.ask("GET", path, rig.key("secret:consume")[1])
    assert allowed.status_code in (200, 404)  # there is no message 1


async def test_explanations_contain_no_payload_and_no_header(rig: GuardedRig) -> None:
    explained = await rig.ask("GET", "/v1/heaps/jobs/explain", rig.key("jobs:consume")[1])
    assert "hidden" not in explained.text
    assert len(explained.json()["items"]) == 3
