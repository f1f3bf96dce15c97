"""Cross-site requests by a browser on the server's machine are rejected if the server requires no credential."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.guarded_rig import GuardedRig
from tests.integration.http_rig import HttpRig

FOREIGN = [
    {"origin": "http://evil.example", "content-type": "text/plain"},  # posted by a page
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},  # an image, a link
    {"host": "evil.example:7480"},  # the page's own name, which resolves to 127.0.0.1
    {"host": "127.0.0.1.evil.example"},
    {"host": "localhost:7480@evil.example"},
    {"host": "[::1"},
]
LOCAL = [
    {}, {"host": "localhost:7480"}, {"host": "[::1]:7480"}, {"origin": "http://localhost:3000"},
    {"sec-fetch-site": "none"},
]  # fmt: skip
ITEM = {"namespace": "default", "topic": "jobs", "payload": "eA=="}


@pytest.fixture
async def unlocked(tmp_path: Path) -> AsyncIterator[HttpRig]:
    async with HttpRig(tmp_path, insecure_everybody=True) as rig:
        yield rig


@pytest.mark.parametrize("headers", FOREIGN)
async def test_server_without_credentials_rejects_cross_site_requests(
    unlocked: HttpRig, headers: dict[str, str]
) -> None:
    await unlocked.heap()
    for path in ("/enqueue", "/v1/heaps/jobs:pause"):
        response = await unlocked.http.post(path, json=[ITEM] if path == "/enqueue" else None, headers=headers)
        assert (response.status_code, response.json()["error"]) == (401, "Unauthenticated")
    response = await unlocked.http.get("/dequeue", params={"namespace": "default", "topic": "jobs"}, headers=headers)
    assert response.status_code == 401
    assert (await unlocked.behind.stats("jobs")).ready == 0
    assert not (await unlocked.behind.stats("jobs")).paused


@pytest.mark.parametrize("headers", LOCAL)
async def test_server_without_credentials_serves_its_own_machine(unlocked: HttpRig, headers: dict[str, str]) -> None:
    assert (await unlocked.http.get("/v1/heaps", headers=headers)).status_code == 200


async def test_metrics_without_a_key_reject_cross_site_requests(tmp_path: Path) -> None:
    async with GuardedRig(tmp_path) as rig:
        for headers in FOREIGN:
            assert (await rig.http.get("/metrics", headers=headers)).status_code == 401
            key = {"authorization": f"Bearer {rig.admin_key}"}
            assert (await rig.http.get("/metrics", headers=headers | key)).status_code == 200
        for headers in LOCAL:
            assert (await rig.http.get("/metrics", headers=headers)).status_code == 200
