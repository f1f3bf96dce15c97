"""Hostile clients of the dashboard: links, forms, streams and dialogs that no page of its own would send."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from heapline import Outgoing
from heapline.contract.message import TopicStats
from heapline.dashboard.actions import ACTIONS
from heapline.dashboard.app import STREAMS_MAX, Dashboard
from heapline.dashboard.pages.topics import TABS
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
            (f"end-leases?topic=jobs&id={id}&seen=2026-01-01T00:00:00Z", "seen"),
            ("replay-matching?topic=jobs", "as_of"),
        ):
            assert 'role="alert"' in await pages.act(path, headers, {name: text})
    text = await pages.act("set-config?topic=jobs&setting=max_retries_default", headers, {"value": "[" * 50_000})
    assert "not valid JSON" in text


async def test_ending_leases_keeps_to_those_on_the_page_whatever_the_clock_of_the_machine(pages: Pages) -> None:
    """The rig's leases have times of a test's clock, years away from this machine's."""
    headers = await pages.log_in()
    await pages.behind.enqueue_batch("jobs", [Outgoing(b"x")] * 2)
    (old,) = await pages.behind.pop("jobs", 1, holder="old")
    page = (await pages.http.get("/ui/topics/jobs?tab=leases", headers=headers)).text
    seen = re.search('name="seen" id="seen" value="([^"]+)"', page)
    assert seen
    pages.clock.advance(5)
    (new,) = await pages.behind.pop("jobs", 1, holder="new")
    query = {"topic": "jobs", "id": f"{old.message_id}", "seen": seen[1]}
    dialog = await pages.http.get("/ui/do/end-leases", params=query, headers=headers)
    assert f'name="seen" value="{seen[1]}"' in dialog.text
    path = f"end-leases?topic=jobs&id={old.message_id}&id={new.message_id}&seen={quote(seen[1])}"
    assert "Ended 1 lease " in await pages.act(path, headers, {"seen": seen[1]})
    assert [lease.holder for lease in await pages.behind.list_leases("jobs")] == ["new"]


# -- rights ------------------------------------------------------------------------------------------------------------

TOPIC, SECRET = "theirs", "s3cr3t"  # a topic that the caller may not see, and everything in it


async def make_theirs(rig: Pages) -> tuple[str, str]:
    """Make the topic of others. Return ids of a dead and of a waiting message."""
    await rig.behind.create_topic(TOPIC, **{**rig.small, "max_retries_default": 0, "fairness": "keys"})
    secrets: dict[str, Any] = {"key": SECRET, "fairness_key": SECRET, "headers": {SECRET: SECRET}}
    await rig.behind.enqueue_batch(TOPIC, [Outgoing(SECRET.encode(), **secrets)] * 5)
    (message,) = await rig.behind.pop(TOPIC, 1, holder=SECRET)
    await message.nack(reason=SECRET)
    await rig.behind.pop(TOPIC, 1, holder=SECRET)
    await rig.behind.create_schedule(TOPIC, topic=TOPIC, payload=SECRET.encode(), every=3600.0)
    return (await rig.behind.dlq_list(TOPIC))[0].message_id, (await rig.behind.peek(TOPIC))[0].message_id


def shows_theirs(text: str, path: str) -> bool:
    return SECRET in text or (TOPIC not in path and TOPIC in text)


async def test_no_page_or_stream_shows_a_topic_of_others(pages: Pages) -> None:
    ids = await make_theirs(pages)
    paths = ["/", "/topics", "/workers", "/dead", "/schedules", "/pipeline", "/access", "/access?tab=users", "/audit"]
    paths += [f"/topics/{TOPIC}?tab={tab}" for tab in TABS]
    paths += [f"/dead?topic={TOPIC}{more}" for more in ("", "&show=letters", "&reason=s", "&key=s")]
    for id in ids:
        paths += [f"/message?topic={TOPIC}&id={id}", f"/message?topic=jobs&id={id}", f"/messages?q={id}"]
    paths += [f"/messages?topic={TOPIC}&q=s", f"/messages?topic={TOPIC}&key=s", "/messages?q=the"]
    mine, everyone = await pages.log_in(pages.key("jobs:consume")[1]), await pages.log_in()
    visible = 0
    for path in paths:
        answer = await pages.http.get(f"/ui{path}", headers=mine)
        assert answer.status_code < 500
        assert not shows_theirs(answer.text, path), path
        visible += shows_theirs((await pages.http.get(f"/ui{path}", headers=everyone)).text, path)
        live = "/ui/live", {"view": path}
        async with (
            # Someone with other rights watches the same place.
            pages.http.stream("GET", live[0], params=live[1], headers=everyone),
            pages.http.stream("GET", live[0], params=live[1], headers=mine) as stream,
        ):
            assert stream.status_code == 200
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    async for line in stream.aiter_lines():
                        assert not shows_theirs(line, path), path
    assert visible >= 15


# -- payloads ----------------------------------------------------------------------------------------------------------

#: Each has the marker in a form of its own: text, a string of JSON, and bytes that are shown as hex.
MARKER = "p4yl0ad"
PAYLOADS = (MARKER.encode(), b'{"a": "%s"}' % MARKER.encode(), b"\x00\xff" + MARKER.encode() + b"\x00")
HEADER = "h34der"  # of the messages that have these payloads
DESTRUCTIVE = ("purge", "delete-dead", "delete-matching", "delete-group", "delete-schedule", "delete-topic")


def shows_payload(text: str) -> bool:
    """Whether an answer has the marker: as it is, as hex with or without spaces, or anywhere in base64."""
    raw = MARKER.encode()
    bare = re.sub(r"\s", "", text)
    # What precedes the marker shifts base64 by 0 to 2 bytes; the marker alone decides the characters in the middle.
    shifted = [base64.b64encode(b"\x00" * n + raw).decode()[(n * 8 + 5) // 6 : -4] for n in range(3)]
    return MARKER in text or raw.hex() in bare.lower() or any(part in bare for part in shifted)


def test_payloads_are_recognized_in_every_form() -> None:
    for payload in PAYLOADS:
        assert shows_payload(payload.decode("latin-1"))
        assert shows_payload(f"<pre>{payload.hex(' ')}</pre>")
        assert shows_payload(f'"{base64.b64encode(payload).decode()}"')
    assert not shows_payload("a payload of 7 bytes")


async def make_payloads(rig: Pages) -> list[str]:
    """Put the payloads in every state and place that pages show. Return an id of each state."""
    await rig.behind.update_topic("jobs", max_retries_default=0)
    await rig.behind.enqueue_batch(
        "jobs", [Outgoing(payload, key="k", headers={"h": HEADER}) for payload in PAYLOADS * 3]
    )
    await rig.behind.enqueue_batch("jobs", [Outgoing(payload, delay=3600) for payload in PAYLOADS])
    for message in await rig.behind.pop("jobs", 3, holder="w"):
        await message.nack(reason="failed")
    leased = await rig.behind.pop("jobs", 3, holder="w")
    await rig.behind.create_group("jobs", "g", start="earliest")
    await rig.behind.create_schedule("nightly", topic="jobs", payload=PAYLOADS[0], every=3600.0)
    dead, ready = await rig.behind.dlq_list("jobs"), await rig.behind.peek("jobs")
    return [message.message_id for message in [*dead[:3], *ready[:3], *leased]]


async def first_event(pages: Pages, path: str, headers: dict[str, str]) -> str:
    """Return what a stream sends first: all that changes on the page, or an error. "" if nothing on it changes."""
    async with pages.http.stream("GET", "/ui/live", params={"view": path}, headers=headers) as stream:
        if stream.status_code != 200:
            return (await stream.aread()).decode()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                async for line in stream.aiter_lines():
                    if line.startswith("data:"):
                        return line
    return ""


@pytest.mark.parametrize("rights", ["produce", "produce,admin"])
async def test_payloads_are_never_sent_without_the_right_to_read_them(pages: Pages, rights: str) -> None:
    ids = await make_payloads(pages)
    paths = ["/", "/topics", "/workers", "/dead", "/schedules", "/pipeline", "/access", "/audit", "/messages?q=jobs"]
    paths += [f"/topics/jobs?tab={tab}" for tab in TABS]
    paths += [f"/dead?topic=jobs{more}" for more in ("", "&show=letters", "&reason=failed", "&key=k")]
    paths += [f"/messages?topic=jobs&{more}" for more in (f"q={MARKER[:3]}", "key=k")]
    paths += [f"/messages?q={id}" for id in ids]
    paths += [f"/message?topic=jobs&id={id}&as={form}" for id in ids for form in ("json", "text", "hex")]
    mine = await pages.log_in(pages.key(f"jobs:{rights}", "other:consume")[1])
    reader = await pages.log_in(pages.key("jobs:consume")[1])
    seen = {"page": 0, "stream": 0}
    for path in paths:
        # The reader goes first: what was read for others must not be shared with a caller who has other rights.
        seen["page"] += shows_payload((await pages.http.get(f"/ui{path}", headers=reader)).text)
        answer = await pages.http.get(f"/ui{path}", headers=mine)
        assert answer.status_code < 500, path
        assert not shows_payload(answer.text), path
        assert HEADER not in answer.text, path
        if not path.startswith("/messages") and not path.endswith(("=json", "=hex")):
            seen["stream"] += HEADER in await first_event(pages, path, reader)
            streamed = await first_event(pages, path, mine)
            assert not shows_payload(streamed), path
            assert HEADER not in streamed, path
    assert seen["page"] >= 3 * len(ids)
    assert seen["stream"] >= len(ids)  # payloads do not change, so only the headers beside them are streamed


@pytest.mark.parametrize("rights", ["produce", "produce,admin"])
async def test_actions_never_send_payloads_without_the_right_to_read_them(pages: Pages, rights: str) -> None:
    ids = await make_payloads(pages)
    headers = await pages.log_in(pages.key(f"jobs:{rights}")[1])
    found = re.search('name="csrf" value="([^"]+)"', (await pages.http.get("/ui/", headers=headers)).text)
    assert found
    now = "2030-01-01T00:00:00Z"
    form = {"csrf": found[1], "typed": "jobs", "as_of": now, "seen": now, "to": "0", "value": "5", "name": "nightly"}
    form |= {"topic": "jobs", "every": "60", "email": "a@b.c", "password": "long enough for one", "scopes": "*:admin"}
    done = 0
    for action in sorted(ACTIONS, key=lambda name: (DESTRUCTIVE.index(name) if name in DESTRUCTIVE else -1, name)):
        for id in ids[::3]:  # dead, ready and leased
            query = {"topic": "jobs", "id": id, "partition": "0", "group": "g", "setting": "max_retries_default"}
            query |= {"name": "nightly", "key": "x", "email": "a@b.c"}
            dialog = await pages.http.get(f"/ui/do/{action}", params=query, headers=headers)
            answer = await pages.http.post(f"/ui/do/{action}", params=query, data=form, headers=headers)
            assert not shows_payload(dialog.text), action
            assert not shows_payload(answer.text), action
            done += "data-done" in answer.text
    assert done >= (10 if "admin" in rights else 1)


def without_times(stats: TopicStats) -> TopicStats:
    """Return statistics without what changes by itself: ages, and the free space of the disk."""
    assert stats.log is not None
    log = msgspec.structs.replace(stats.log, snapshot_age=None, disk_free_bytes=None)
    return msgspec.structs.replace(stats, oldest_ready_age=None, partitions=[], log=log)


async def test_no_action_reads_or_changes_a_topic_of_others(pages: Pages) -> None:
    ids = await make_theirs(pages)
    headers = await pages.log_in(pages.key("jobs:produce,consume,admin")[1])
    before = await pages.behind.stats(TOPIC), await pages.behind.get_topic(TOPIC), await pages.behind.list_schedules()
    found = re.search('name="csrf" value="([^"]+)"', (await pages.http.get("/ui/", headers=headers)).text)
    assert found
    later = "2030-01-01T00:00:00Z"
    form = {"csrf": found[1], "typed": TOPIC, "as_of": later, "seen": later, "to": "0", "value": "5", "name": TOPIC}
    form |= {"topic": TOPIC, "every": "60", "email": "a@b.c", "password": "long enough for one", "scopes": "*:admin"}
    for action in ACTIONS:
        for id in ids:
            query = {"topic": TOPIC, "id": id, "partition": "0", "group": "g", "setting": "max_retries_default"}
            query |= {"name": TOPIC, "key": "x", "email": "a@b.c"}
            shown = await pages.http.get(f"/ui/do/{action}", params=query, headers=headers)
            done = await pages.http.post(f"/ui/do/{action}", params=query, data=form, headers=headers)
            for answer in (shown, done):
                assert answer.status_code < 500, action
                assert SECRET not in answer.text, action
            assert "data-done" not in done.text, action
    after = await pages.behind.stats(TOPIC), await pages.behind.get_topic(TOPIC), await pages.behind.list_schedules()
    assert without_times(after[0]) == without_times(before[0])
    assert after[1:] == before[1:]


async def test_read_only_dashboard_refuses_every_action(tmp_path: Path) -> None:
    rig = Pages(tmp_path, read_only=True)
    await rig.start()
    try:
        headers = await rig.log_in()
        found = re.search('name="csrf" value="([^"]+)"', (await rig.http.get("/ui/", headers=headers)).text)
        assert found
        for name in ACTIONS:
            for method in ("GET", "HEAD", "POST", "PUT", "OPTIONS"):
                answer = await rig.http.request(
                    method, f"/ui/do/{name}?topic=jobs", headers=headers, data={"csrf": found[1]}
                )
                assert answer.status_code in (400, 405), (name, method)
    finally:
        await rig.stop()
