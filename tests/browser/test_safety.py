"""Text of users is text, changes come from this session's pages, and rights hold on pages as elsewhere."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

import heapline.dashboard
from heapline import Backoff, Outgoing
from tests.browser.conftest import PATIENCE, expect

pytestmark = pytest.mark.slow
EVIL = (
    '"><img src=x onerror=alert(1)><script>alert(2)</script>'
    '<b hx-get="/ui/logout" hx-trigger="load" hx-on:load="alert(3)">bold</b>'
    '<hx-partial hx-target="#main">gone</hx-partial>'
)
STILL = ("/messages", "/dead?topic=evil", "/access", "/audit", "/topics?")  # pages on which nothing changes by itself
STATIC = Path(heapline.dashboard.__file__).parent


def test_markup_of_users_is_shown_and_never_run(own_server: Callable[..., Any], log_in: Callable[..., Any]) -> None:
    server = own_server()
    with server.client() as hl:
        hl.create_topic("evil", max_retries_default=0, backoff=Backoff(base=0.0), fairness="keys")
        evil = Outgoing(
            EVIL.encode(), key=EVIL[:200], fairness_key=EVIL[:200], headers={EVIL: EVIL, "heapline-task": EVIL[:150]}
        )
        hl.enqueue_batch("evil", [evil] * 4)
        (message,) = hl.pop("evil", 1)
        message.nack(reason=f"Traceback (most recent call last):\n  File x\n{EVIL}")
        hl.pop("evil", 1, holder=EVIL[:100])
        hl.create_schedule("evil", topic="evil", payload=EVIL.encode(), every=3600.0, headers={"a": EVIL})
        hl.record_audit("evil", datetime.now(UTC), 1, refuted=[EVIL[:200]])
        dead = hl.dlq_list("evil")[0].message_id
        waiting = hl.peek("evil")[0].message_id
    headers = {"authorization": f"Bearer {server.key}"}
    base = server.url.removesuffix("/ui")
    key = {"name": EVIL[:100], "scopes": ["*:consume"]}
    httpx.post(f"{base}/v1/keys", json=key, headers=headers, trust_env=False)
    httpx.post(f"{base}/v1/auth/login", json={"email": EVIL, "password": EVIL}, trust_env=False)
    member = contextlib.ExitStack()
    reader = member.enter_context(server.client())
    rows = member.enter_context(reader.subscribe("evil", group="readers", member=EVIL[:100]))
    next(iter(rows))
    page = log_in(server)
    network = page.context.new_cdp_session(page)
    network.send("Network.enable")
    updates: list[Any] = []
    network.on("Network.eventSourceMessageReceived", lambda event: updates.append(event))
    page.on("request", lambda request: seen.append(request.url))
    seen: list[str] = []
    dialogs: list[Any] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog), dialog.dismiss()))
    for path, shown in {
        "/": "evil",
        "/topics/evil?tab=next": "img src",
        "/topics/evil": "1 promise broken",
        "/pipeline": "img src",
        "/dead?topic=evil": "bold",  # the reason and the task
        "/dead?topic=evil&show=letters": "bold",
        "/messages?topic=evil&q=bold": "bold",
        f"/message?topic=evil&id={dead}": "bold",
        f"/message?topic=evil&id={dead}&as=hex": "6f 6c 64",
        f"/message?topic=evil&id={waiting}": "bold",
        "/messages?q=%3Cimg%20src=x%20onerror=alert(1)%3E": "No message has this id",
        "/topics?q=%22%3E%3Cscript%3Ealert(1)%3C/script%3E": "<script>",
        "/access": "img src",
        "/audit": "Login",
        "/schedules": "evil",
        "/workers": "img src",
        "/topics/evil?tab=leases": "img src",
        "/topics/evil?tab=groups": "img src",
        "/topics/evil?tab=schedules": "evil",
        "/access?tab=users": "no users",
    }.items():
        updates.clear()
        page.goto(server.url + path)
        expect(page.locator("main")).to_contain_text(shown)
        expect(page.locator("#link, h1").first).to_be_visible()
        if not path.startswith(STILL):  # the first update brings the same text again
            deadline = time.monotonic() + PATIENCE
            while not updates and time.monotonic() < deadline:
                page.wait_for_timeout(50)  # Playwright's events arrive meanwhile
            assert updates, path
        assert page.locator("main img, main script, main [hx-on\\:load], main [hx-trigger]").count() == 0, path
    member.close()
    assert not dialogs
    assert not [url for url in seen if "logout" in url]


def test_markup_in_dialogs_and_toasts_is_text(server: Any, log_in: Callable[..., Any]) -> None:
    with server.client() as hl:
        hl.create_topic("dialogs", partitions=2)
    page = log_in(server)
    page.goto(server.url + "/topics/dialogs?tab=partitions")
    page.get_by_role("row", name=re.compile("^0")).get_by_role("button", name="Throttle").click()
    page.get_by_label("Reason").fill(EVIL[:100])
    page.locator("#dialog button.primary").click()
    expect(page.get_by_role("row", name=re.compile("^0"))).to_contain_text("<img src=x")
    assert page.locator("main img").count() == 0


@pytest.mark.parametrize("token", ["", "0" * 64])
def test_change_without_the_token_of_its_session_is_refused(
    server: Any, log_in: Callable[..., Any], token: str
) -> None:
    with server.client() as hl:
        hl.create_topic("csrf")
        page = log_in(server)
        cookies = {cookie["name"]: cookie["value"] for cookie in page.context.cookies()}
        answer = httpx.post(f"{server.url}/do/pause?topic=csrf", cookies=cookies, data={"csrf": token}, trust_env=False)
        assert answer.status_code == 400
        assert not hl.stats("csrf").paused


def test_change_from_another_site_is_refused_even_with_the_token(server: Any, log_in: Callable[..., Any]) -> None:
    with server.client() as hl:
        hl.create_topic("cross")
        page = log_in(server)
        token = page.locator("form.user input[name=csrf]").get_attribute("value")
        cookies = {cookie["name"]: cookie["value"] for cookie in page.context.cookies()}
        answer = httpx.post(
            f"{server.url}/do/pause?topic=cross",
            cookies=cookies,
            data={"csrf": token},
            headers={"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
            trust_env=False,
        )
        assert answer.status_code == 400
        assert not hl.stats("cross").paused


def test_person_sees_and_changes_only_what_their_scopes_allow(
    server: Any, log_in: Callable[..., Any], watch: Any
) -> None:
    watch.expected.append("403")
    with server.client() as hl:
        hl.create_topic("mine")
        hl.create_topic("theirs")
    headers = {"authorization": f"Bearer {server.key}"}
    body = {"name": "reader", "scopes": ["mine:consume"]}
    base = server.url.removesuffix("/ui")
    secret = httpx.post(f"{base}/v1/keys", json=body, headers=headers, trust_env=False).json()["secret"]
    page = log_in(server, secret)
    expect(page.get_by_role("link", name="mine")).to_be_visible()
    expect(page.get_by_text("theirs")).to_have_count(0)
    expect(page.get_by_role("link", name="Keys and users")).to_have_count(0)
    page.goto(server.url + "/topics/mine")
    expect(page.get_by_role("link", name="Config")).to_be_visible()
    assert page.locator("main .button").count() == 0
    page.goto(server.url + "/topics/theirs")
    expect(page.get_by_role("heading", name="You may not see this")).to_be_visible()
    page.goto(server.url + "/access")
    expect(page.locator("main")).to_contain_text("*:admin")
    cookies = {cookie["name"]: cookie["value"] for cookie in page.context.cookies()}
    page.goto(server.url + "/topics/mine")
    token = page.locator("form.user input[name=csrf]").get_attribute("value")
    answer = httpx.post(f"{server.url}/do/pause?topic=mine", cookies=cookies, data={"csrf": token}, trust_env=False)
    assert "lacks the admin right" in answer.text
    with server.client() as hl:
        assert not hl.stats("mine").paused


def test_answers_forbid_what_is_not_of_this_server(server: Any) -> None:
    for path in ("/login", "/topics", "/static/app.css", "/static/none"):
        answer = httpx.get(server.url + path, trust_env=False)
        assert answer.headers["content-security-policy"].startswith("default-src 'self'; base-uri 'none'")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_templates_use_nothing_that_the_policy_forbids() -> None:
    forbidden = re.compile(
        r"hx-on|js:|javascript:|\son\w+=|style=|hx-trigger=\"[^\"]*\[|\|\s*safe|<script(?![^>]*src=)"
    )
    for template in (STATIC / "templates").glob("*.html"):
        assert not forbidden.search(template.read_text()), template.name


def test_scripts_stay_small_enough_to_be_read() -> None:
    lines = sum(len(script.read_text().splitlines()) for script in (STATIC / "static").glob("*.js"))
    assert lines <= 1500


def test_login_returns_only_to_this_dashboard(server: Any) -> None:
    for after in ("https://evil.example/", "//evil.example/", "/\\evil.example"):
        form = {"key": server.key, "next": after}
        answer = httpx.post(server.url + "/login", data=form, trust_env=False)
        assert answer.headers["location"] == "/ui/"
