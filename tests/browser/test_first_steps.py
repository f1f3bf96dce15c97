"""Logging in, finding one's way, and seeing changes as they happen."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from heapline import Outgoing
from tests.browser.conftest import expect, until

pytestmark = pytest.mark.slow


def test_person_logs_in_with_a_key_and_logs_out(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    expect(page.get_by_role("button", name="Live")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    page.goto(server.url + "/topics")
    expect(page).to_have_url(re.compile(r"/ui/login\?next=%2Ftopics$"))


def test_wrong_key_is_refused_in_words(server: Any, new_page: Callable[..., Any], watch: Any) -> None:
    watch.expected.append("401")
    page = new_page()
    page.goto(server.url)
    page.get_by_label("API key").fill("hl_0123456789abcdef_" + "x" * 43)
    page.get_by_role("button", name="Log in with a key").click()
    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.get_by_label("API key")).to_be_visible()


def test_person_logs_in_with_a_password_and_returns_to_the_page_they_wanted(
    server: Any, new_page: Callable[..., Any]
) -> None:
    headers = {"authorization": f"Bearer {server.key}"}
    user = {"email": "ann@example.org", "password": "correct horse battery", "scopes": ["*:produce,consume,admin"]}
    base = server.url.removesuffix("/ui")
    httpx.post(f"{base}/v1/users", json=user, headers=headers, trust_env=False).raise_for_status()
    page = new_page()
    page.goto(server.url + "/topics")
    page.get_by_label("Email").fill(user["email"])
    page.get_by_label("Password").fill(user["password"])
    page.get_by_role("button", name="Log in with a password").click()
    expect(page.get_by_role("heading", name="Topics")).to_be_visible()
    expect(page.get_by_text("user:ann@example.org")).to_be_visible()


def test_browser_is_redirected_from_the_root_and_programs_are_not(server: Any, new_page: Callable[..., Any]) -> None:
    base = server.url.removesuffix("/ui")
    page = new_page()
    page.goto(base + "/")
    expect(page.get_by_label("API key")).to_be_visible()
    assert httpx.get(base + "/", trust_env=False).status_code == 404


def test_login_link_works_once(server: Any, new_page: Callable[..., Any], watch: Any) -> None:
    base = server.url.removesuffix("/ui")
    headers = {"authorization": f"Bearer {server.key}"}
    token = httpx.post(f"{base}/v1/auth/links", headers=headers, trust_env=False).json()["token"]
    new = new_page()
    new.goto(f"{server.url}/login/{token}")
    expect(new.get_by_role("heading", name="Overview")).to_be_visible()
    watch.expected.append("401")
    other = new_page()
    other.goto(f"{server.url}/login/{token}")
    expect(other.get_by_role("alert")).to_contain_text("the login link is not valid")


def test_new_topic_and_its_messages_appear_on_the_open_overview(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    with server.client() as hl:
        hl.create_topic("appears")
        row = page.get_by_role("row", name=re.compile("^appears"))
        expect(row).to_be_visible()
        hl.enqueue_batch("appears", [Outgoing(b"x")] * 37)
        expect(row).to_contain_text("37")
        hl.create_topic("appears-later")
        expect(page.get_by_role("row", name=re.compile("^appears-later"))).to_be_visible()


def test_rows_do_not_move_under_the_pointer(own_server: Callable[..., Any], log_in: Callable[..., Any]) -> None:
    server = own_server()
    with server.client() as hl:
        for name in ("a", "b"):
            hl.create_topic(name)
        hl.enqueue_batch("a", [Outgoing(b"x")] * 5)
        page = log_in(server)
        page.goto(server.url + "/topics?sort=ready")
        first = page.locator("#topics tr").first
        expect(first).to_contain_text("a")
        first.hover()
        hl.enqueue_batch("b", [Outgoing(b"x")] * 9)
        apply = page.get_by_role("button", name="Order changed · apply")
        expect(apply).to_be_visible()
        expect(page.locator("#topics tr").first).to_contain_text("5")
        apply.click()
        expect(page.locator("#topics tr").first).to_contain_text("9")


def test_open_page_reconnects_after_a_restart_and_says_so(
    own_server: Callable[..., Any], log_in: Callable[..., Any], watch: Any
) -> None:
    watch.expected += ["ERR_", "Failed to load resource"]
    server = own_server()
    page = log_in(server)
    live = page.locator("#link")
    expect(live).to_have_text("Live")
    server.stop()
    expect(live).to_contain_text("Reconnecting")
    server.start()
    expect(live).to_have_text("Live")


def test_ten_tabs_share_one_stream_that_does_not_delay_stopping(
    own_server: Callable[..., Any],
    log_in: Callable[..., Any],
    new_page: Callable[..., Any],
    watch: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEAPLINE_STOP_GRACE", "600")
    server = own_server()
    first = log_in(server)
    tabs = [first, *(new_page(beside=first) for _ in range(9))]
    for tab in tabs[1:]:
        tab.goto(server.url + "/topics")
    with server.client() as hl:
        hl.create_topic("shared")  # the first one: pages that say that there is none load again
        for tab in tabs:
            expect(tab.get_by_role("link", name="shared")).to_be_visible()
        hl.enqueue_batch("shared", [Outgoing(b"x")] * 8765)
        for tab in tabs:
            expect(tab.get_by_role("row", name=re.compile("^shared"))).to_contain_text("8\u202f765")
        until(lambda: open_streams(server) == 1.0)  # the leader opens another one when its tabs change
    watch.expected += ["ERR_", "Failed to load resource"]
    server.stop()  # a stream that did not end would hold it for all of the grace, which is longer than this waits


#: A headless browser never hides a tab. With this, the key F9 hides the page and shows it again, as far as scripts see.
HIDE = """
let hidden = false;
Object.defineProperty(Document.prototype, "hidden", {get: () => hidden});
addEventListener("keydown", (event) => {
  if (event.key !== "F9") return;
  hidden = !hidden;
  document.dispatchEvent(new Event("visibilitychange"));
});
"""


def test_hidden_tab_closes_its_stream_and_is_current_when_it_is_shown_again(
    own_server: Callable[..., Any], log_in: Callable[..., Any]
) -> None:
    server = own_server()
    page = log_in(server)
    page.context.add_init_script(HIDE)
    page.goto(server.url + "/topics")
    until(lambda: open_streams(server) == 1.0)
    page.keyboard.press("F9")
    until(lambda: open_streams(server) == 0.0)
    with server.client() as hl:
        hl.create_topic("meanwhile")
    page.keyboard.press("F9")
    expect(page.get_by_role("link", name="meanwhile")).to_be_visible()
    until(lambda: open_streams(server) == 1.0)


def open_streams(server: Any) -> float:
    metrics = httpx.get(server.url.removesuffix("/ui") + "/metrics", trust_env=False).text
    found = re.search(r'calls_open\{call="Live",interface="dashboard"\} (\S+)', metrics)
    return float(found[1]) if found else 0.0
