"""A key that is revoked while its request is still being sent, or waits for its turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.guarded_rig import GuardedRig
from tests.integration.test_unauthenticated_clients import Raw
from tests.unit.engine.rig import until

ALL = "*:produce,consume,admin"
KEY = {"name": "another", "scopes": [ALL]}
USER = {"email": "eve@example.org", "password": "correct horse battery", "scopes": [ALL]}
ITEM = {"namespace": "default", "topic": "jobs", "payload": "eA=="}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[GuardedRig]:
    async with GuardedRig(tmp_path) as rig:
        yield rig


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/keys", KEY), ("/v1/users", USER), ("/v1/heaps", {"topic": "more"}), ("/enqueue", [ITEM]),
        ("/v1/enqueue", {"topic": "jobs", "payload_text": "x"}),
    ],
)  # fmt: skip
async def test_key_revoked_while_its_body_is_sent_does_nothing(rig: GuardedRig, path: str, body: Any) -> None:
    key_id, leaked = rig.key(ALL)
    await rig.ask("GET", "/v1/heaps", leaked)
    data, uses = json.dumps(body).encode(), rig.guard.authenticate
    known = asyncio.Event()

    async def authenticate(credential: str | None) -> Any:
        try:
            return await uses(credential)
        finally:
            known.set()

    rig.guard.authenticate = authenticate  # type: ignore[method-assign]
    async with Raw(rig) as raw:
        length = f"content-length: {len(data)}"
        await raw.head(path, f"authorization: Bearer {leaked}", "content-type: application/json", length)
        await raw.say(data[:5])
        await asyncio.wait_for(known.wait(), 20)
        assert (await rig.confirm("DELETE", f"/v1/keys/{key_id}")).status_code == 200
        await raw.say(data[5:])
        assert await raw.status() == 401
    assert len(rig.guard.keys.list()) == 2
    assert rig.guard.users.list() == []
    assert [info.name for info in await rig.behind.list_topics()] == ["jobs"]
    assert (await rig.behind.stats("jobs")).ready == 0


async def test_key_revoked_while_its_changes_wait_applies_none_of_them(rig: GuardedRig) -> None:
    key_id, leaked = rig.key(ALL)
    async with rig.guard._changing:  # another change is in progress
        revoking = asyncio.ensure_future(rig.confirm("DELETE", f"/v1/keys/{key_id}"))
        await until(lambda: bool(rig.guard._changing._waiters))
        making = [
            asyncio.ensure_future(rig.ask("POST", path, leaked, json=body))
            for path, body in (("/v1/keys", KEY), ("/v1/users", USER))
        ]
        await until(lambda: len(rig.guard._changing._waiters or ()) == 3)
    assert (await revoking).status_code == 200
    assert [(await made).status_code for made in making] == [401, 401]
    assert len(rig.guard.keys.list()) == 2
    assert rig.guard.users.list() == []
