"""Hostile clients of the dashboard: links, forms, streams and dialogs that no page of its own would send."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from heapline.dashboard.app import STREAMS_MAX, Dashboard
from tests.integration.guarded_rig import GuardedRig

NAVIGATION = {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}


class Pages(GuardedRig):
    """A server with the dashboard."""

    dashboard = Dashboard

    async def link(self) -> str:
        principal = await self.guard.authenticate(self.admin_key)
        return f"/ui/login/{self.server.sessions.mint_link(principal).token.reveal()}"

    async def log_in(self, key: str = "") -> dict[str, str]:
        """Return the headers of a logged-in browser."""
        answer = await self.http.post("/ui/login", data={"key": key or self.admin_key})
        assert answer.status_code == 303, answer.text
        return {"cookie": answer.headers["set-cookie"].partition(";")[0]}

    async def act(self, path: str, headers: dict[str, str], form: dict[str, Any]) -> str:
        page = (await self.http.get("/ui/", headers=headers)).text
        found = re.search('name="csrf" value="([^"]+)"', page)
        assert found
        answer = await self.http.post(f"/ui/do/{path}", headers=headers, data={"csrf": found[1], **form})
        assert answer.status_code < 500, answer.text
        return answer.text


@pytest.fixture
async def pages(tmp_path: Path) -> AsyncIterator[Pages]:
    rig = Pages(tmp_path)
    await rig.start()
    try:
        yield rig
    finally:
        await rig.stop()


async def raw(rig: Pages, head: str) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", rig.server.http_port)
    writer.write(head.encode())
    await writer.drain()
    return writer


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("HEAD", NAVIGATION),
        ("GET", {"user-agent": "a chat's preview"}),
        ("GET", NAVIGATION | {"sec-purpose": "prefetch"}),
        ("GET", NAVIGATION | {"sec-fetch-site": "cross-site"}),
    ],
)
async def test_login_link_is_used_up_only_by_a_person(pages: Pages, method: str, headers: dict[str, str]) -> None:
    link = await pages.link()
    looked = await pages.http.request(method, link, headers=headers)
    assert looked.status_code == 200
    assert "set-cookie" not in looked.headers
    opened = await pages.http.get(link, headers=NAVIGATION)
    assert opened.status_code == 303
    assert "set-cookie" in opened.headers
    assert (await pages.http.get(link, headers=NAVIGATION)).status_code == 401


async def test_button_of_a_login_link_logs_in_from_this_site_alone(pages: Pages) -> None:
    link = await pages.link()
    assert '<form method="post">' in (await pages.http.get(link)).text
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://evil.example"}, {"origin": "null"}):
        forged = await pages.http.post(link, headers=headers)
        assert forged.status_code == 400
        assert "set-cookie" not in forged.headers
    opened = await pages.http.post(link, headers={"sec-fetch-site": "same-origin"})
    assert "set-cookie" in opened.headers


async def test_login_link_used_by_many_at_once_logs_in_one(pages: Pages) -> None:
    link = await pages.link()
    answers = await asyncio.gather(*(pages.http.post(link) for _ in range(20)))
    assert sorted(answer.status_code for answer in answers) == [303, *[401] * 19]


# -- streams -----------------------------------------------------------------------------------------------------------


async def test_stream_whose_client_left_before_its_first_event_gives_its_place_back(pages: Pages) -> None:
    cookie = (await pages.log_in())["cookie"]
    headers = [(b"host", b"x"), (b"cookie", cookie.encode())]
    scope = {"type": "http", "method": "GET", "path": "/ui/live", "query_string": b"view=/topics", "headers": headers}

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.Event().wait()  # the connection takes nothing more

    assert pages.server.dashboard is not None
    await pages.server.dashboard(scope, receive, send)
    assert not pages.server.gate.streams.held


async def test_stream_without_a_body_ends(pages: Pages) -> None:
    headers = await pages.log_in()
    answer = await pages.http.head("/ui/live?view=/topics", headers=headers)
    assert answer.status_code == 200
    assert not pages.server.gate.streams.held


async def test_one_key_cannot_open_streams_without_end(pages: Pages) -> None:
    cookie = (await pages.log_in())["cookie"]
    head = f"GET /ui/live?view=/topics HTTP/1.1\r\nhost: x\r\ncookie: {cookie}\r\n\r\n"
    writers = [await raw(pages, head) for _ in range(STREAMS_MAX)]
    async with asyncio.timeout(20):
        while sum(pages.server.gate.streams.held.values()) < STREAMS_MAX:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    refused = await pages.http.get("/ui/live?view=/topics", headers={"cookie": cookie})
    assert refused.status_code == 429
    other = await pages.log_in(pages.key("*:consume")[1])
    async with pages.http.stream("GET", "/ui/live?view=/topics", headers=other) as stream:
        assert stream.status_code == 200
    for writer in writers:
        writer.transport.abort()


# -- forms and dialogs -------------------------------------------------------------------------------------------------


async def test_dialogs_reject_what_they_did_not_write(pages: Pages) -> None:
    headers = await pages.log_in()
    id = (await pages.behind.enqueue("jobs", b"x")).message_id
    for text in ("yesterday", "2026-01-01T00:00:00", "9999-99-99", "1" * 5000):
        for path, name in (
            (f"end-leases?topic=jobs&id={id}", "seen"),
            ("replay-matching?topic=jobs", "as_of"),
        ):
            assert 'role="alert"' in await pages.act(path, headers, {name: text})
    text = await pages.act("set-config?topic=jobs&setting=max_retries_default", headers, {"value": "[" * 50_000})
    assert "not valid JSON" in text
