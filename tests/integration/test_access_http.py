"""Keys and users over HTTP: the rights to change them, the responses, and that no caller grants rights they lack."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from heapline.contract.call import cursor_of
from heapline.contract.errors import Unauthenticated
from heapline.server.auth.secret import Secret
from tests.integration.guarded_rig import EMAIL, GuardedRig
from tests.integration.server_rig import Rig
from tests.unit.server.auth.rig import PASSWORD

OTHER_PASSWORD = "another horse battery"
ROUTES: list[tuple[str, str, Any]] = [
    ("GET", "/v1/keys", None),
    ("POST", "/v1/keys", {"name": "k", "scopes": ["jobs:consume"]}),
    ("DELETE", "/v1/keys/0123456789abcdef?force=true", None),
    ("GET", "/v1/users", None),
    ("POST", "/v1/users", {"email": "eve@example.org", "password": PASSWORD, "scopes": ["jobs:consume"]}),
    ("PATCH", f"/v1/users/{EMAIL}", {"disabled": True}),
    ("DELETE", f"/v1/users/{EMAIL}?force=true", None),
    ("POST", "/v1/auth/links", None),
]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[GuardedRig]:
    async with GuardedRig(tmp_path) as rig:
        yield rig


def users_and_keys(rig: GuardedRig) -> tuple[Any, Any]:
    file = rig.guard.store.file
    return dict(file.users), {key: record.revoked_at for key, record in file.keys.items()}


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
async def test_only_an_administrator_of_all_topics_manages_keys(
    rig: GuardedRig, method: str, path: str, body: Any
) -> None:
    await rig.token()
    outsiders = [rig.key(s)[1] for s in ("*:produce,consume", "default/*:admin", "jobs:produce,consume,admin")]
    before = users_and_keys(rig)
    for credential in outsiders:
        assert (await rig.ask(method, path, credential, json=body)).status_code == 403
    assert (await rig.http.request(method, path, json=body)).status_code == 401
    assert users_and_keys(rig) == before


async def test_key_is_created_used_listed_and_revoked(rig: GuardedRig) -> None:
    made = await rig.ask("POST", "/v1/keys", json={"name": "worker", "scopes": ["jobs:consume,produce"]})
    assert made.status_code == 201
    key, secret = made.json()["key"], made.json()["secret"]
    assert made.headers["cache-control"] == "no-store"
    assert key["scopes"] == ["jobs:produce,consume"]
    assert not {"last_used_at", "revoked_at"} & key.keys()
    async with rig.as_(secret) as worker:
        await worker.enqueue("jobs", b"x")
        listed = await rig.ask("GET", "/v1/keys")
        found = next(k for k in listed.json()["items"] if k["id"] == key["id"])
        assert found["created_at"] == key["created_at"]
        assert found["last_used_at"] >= found["created_at"]
        assert secret.split("_", 2)[2] not in listed.text
        assert "counted:" not in listed.text  # not even a hash
        gone = await rig.confirm("DELETE", f"/v1/keys/{key['id']}")
        assert gone.json()["key"]["revoked_at"] is not None
        with pytest.raises(Unauthenticated):
            await worker.enqueue("jobs", b"x")


async def test_login_link_starts_one_session_of_its_caller(rig: GuardedRig) -> None:
    made = await rig.ask("POST", "/v1/auth/links")
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    session = rig.server.sessions.redeem(made.json()["token"])
    assert session.principal.subject == f"key:{rig.admin_key.split('_')[1]}"
    with pytest.raises(Unauthenticated):
        rig.server.sessions.redeem(made.json()["token"])


async def test_keys_and_users_are_listed_in_pages(rig: GuardedRig) -> None:
    for name in ("b@example.org", "a@example.org"):
        body = {"email": name, "password": PASSWORD, "scopes": ["jobs:consume"]}
        assert (await rig.ask("POST", "/v1/users", json=body)).status_code == 201
    expected = {"keys": [k.id for k in rig.guard.keys.list()], "users": ["a@example.org", "b@example.org"]}
    for noun, names in expected.items():
        found, cursor = [], ""
        while cursor is not None:
            page = (await rig.ask("GET", f"/v1/{noun}?limit=1" + (cursor and f"&cursor={cursor}"))).json()
            found += [item.get("id", item.get("email")) for item in page["items"]]
            assert len(page["items"]) == 1
            cursor = page.get("cursor")
        assert found == names


async def test_statistics_show_only_topics_that_the_caller_may_consume(rig: GuardedRig) -> None:
    for topic in ("jobs", "mail", "shop/a"):
        await rig.behind.create_topic(topic, **rig.small)
    visible = {"*:consume": ["jobs", "mail", "shop/a"], "shop/*:consume": ["shop/a"], "*:produce": []}
    for scopes, names in visible.items():
        answer = (await rig.ask("GET", "/v1/stats", rig.key(scopes)[1])).json()
        assert [stats["topic"] for stats in answer["items"]] == names


@pytest.mark.parametrize("place", [("2026-01-01T00:00:00", ""), (1, ""), "x"])
async def test_cursor_that_no_page_of_keys_returned_is_refused(rig: GuardedRig, place: Any) -> None:
    refused = await rig.ask("GET", f"/v1/keys?cursor={cursor_of(place)}")
    assert (refused.status_code, refused.json()["error"]) == (400, "BadRequest")


async def test_user_is_created_changed_and_disabled(rig: GuardedRig) -> None:
    body = {"email": "Eve@Example.org", "password": PASSWORD, "scopes": ["jobs:consume"]}
    made = await rig.ask("POST", "/v1/users", json=body)
    assert (made.status_code, made.json()["user"]["email"]) == (201, "eve@example.org")
    assert PASSWORD not in made.text
    token = (await rig.guard.login("eve@example.org", Secret(PASSWORD))).reveal()
    changed = await rig.ask(
        "PATCH", "/v1/users/eve@example.org", json={"password": OTHER_PASSWORD, "scopes": ["jobs:produce"]}
    )
    assert changed.json()["user"]["scopes"] == ["jobs:produce"]
    assert (await rig.ask("GET", "/v1/heaps", token)).status_code == 401
    await rig.guard.login("eve@example.org", Secret(OTHER_PASSWORD))
    out = await rig.confirm("DELETE", "/v1/users/eve@example.org")
    assert out.json()["user"]["disabled_at"] is not None
    with pytest.raises(Unauthenticated):
        await rig.guard.login("eve@example.org", Secret(OTHER_PASSWORD))
    await rig.ask("PATCH", "/v1/users/eve@example.org", json={"disabled": False})
    await rig.guard.login("eve@example.org", Secret(OTHER_PASSWORD))
    assert [u["email"] for u in (await rig.ask("GET", "/v1/users")).json()["items"]] == ["eve@example.org"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/keys", {"name": "k", "scopes": ["jobs:admin", "jobs:produce"]}),
        ("POST", "/v1/keys", {"name": "k", "scopes": ["*:consume"]}),
        ("POST", "/v1/users", {"email": "eve@example.org", "password": PASSWORD, "scopes": ["*:admin,produce"]}),
        ("PATCH", f"/v1/users/{EMAIL}", {"scopes": ["jobs:consume"]}),
        ("PATCH", f"/v1/users/{EMAIL}", {"password": OTHER_PASSWORD}),  # and then log in as that user
        ("PATCH", f"/v1/users/{EMAIL}", {"disabled": False}),
    ],
)
async def test_admins_cannot_grant_rights_they_lack(rig: GuardedRig, method: str, path: str, body: Any) -> None:
    await rig.token()  # of a user who has all rights
    _, admin_only = rig.key("*:admin")
    before = users_and_keys(rig)
    refused = await rig.ask(method, path, admin_only, json=body)
    assert (refused.status_code, refused.json()["error"]) == (403, "PermissionDenied")
    assert users_and_keys(rig) == before
    assert (await rig.ask(method, path, json=body)).status_code in (200, 201)  # a caller with all rights may


async def test_administrator_without_other_rights_grants_admin_and_revokes(rig: GuardedRig) -> None:
    await rig.token()
    _, admin_only = rig.key("*:admin")
    made = await rig.ask("POST", "/v1/keys", admin_only, json={"name": "k", "scopes": ["orders/*:admin"]})
    assert made.status_code == 201
    assert (await rig.confirm("DELETE", f"/v1/users/{EMAIL}", admin_only)).status_code == 200
    lowered = await rig.ask(
        "PATCH", f"/v1/users/{EMAIL}", admin_only, json={"scopes": ["jobs:admin"], "password": OTHER_PASSWORD}
    )
    assert lowered.status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/keys", b"{"),
        ("/v1/keys", b"\xff"),
        ("/v1/keys", b'{"name": "k"}'),
        ("/v1/keys", b'{"name": "k", "scopes": []}'),
        ("/v1/keys", b'{"name": "k", "scopes": ["nonsense"]}'),
        ("/v1/keys", b'{"name": "k", "scopes": ["jobs:consume"], "swordfish": 1}'),
        ("/v1/users", b'{"email": "no address", "password": "swordfish swordfish", "scopes": ["jobs:consume"]}'),
        ("/v1/users", b'{"email": "a@b.org", "password": ["swordfish swordfish"], "scopes": ["jobs:consume"]}'),
        ("/v1/users", b'{"email": "a@b.org", "password": "swordfish", "scopes": ["jobs:consume"]}'),
    ],
)
async def test_invalid_body_is_refused_and_passwords_are_not_repeated(rig: GuardedRig, path: str, body: bytes) -> None:
    before = users_and_keys(rig)
    response = await rig.ask("POST", path, content=body)
    assert (response.status_code, response.json()["error"]) == (400, "BadRequest")
    assert "swordfish swordfish" not in response.text
    assert users_and_keys(rig) == before


async def test_form_encoded_requests_are_rejected(rig: GuardedRig) -> None:
    headers = {"content-type": "text/plain", "authorization": f"Bearer {rig.admin_key}"}
    response = await rig.http.post("/v1/keys", content=b'{"name": "k", "scopes": ["*:admin"]}', headers=headers)
    assert response.status_code == 415


async def test_argon2_of_a_new_key_does_not_delay_other_calls(rig: GuardedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(rig.hasher, "hash", lambda secret: go.wait(10) and "counted:x")
    making = asyncio.ensure_future(rig.ask("POST", "/v1/keys", json={"name": "k", "scopes": ["jobs:consume"]}))
    try:
        assert (await rig.ask("GET", "/v1/heaps")).status_code == 200
        assert not making.done()
    finally:
        go.set()
    assert (await making).status_code == 201


async def test_server_without_a_guard_has_no_keys(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig, httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"http://127.0.0.1:{rig.server.http_port}/v1/keys")).status_code == 400
