"""Every page under load, in light and dark: accessible, usable on a phone, and pictured for docs/dashboard.md.

With HEAPLINE_PICTURES, a directory, and HEAPLINE_LOAD_SECONDS=200 this file also takes the pictures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from heapline import Outgoing
from tests.browser.conftest import PATIENCE, ServerProcess, expect, until

pytestmark = pytest.mark.slow
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
PICTURES = os.environ.get("HEAPLINE_PICTURES")
LOAD_SECONDS = float(os.environ.get("HEAPLINE_LOAD_SECONDS", "1"))  # that charts show at least; longer for pictures
PAGES = {
    "overview": "/",
    "topics": "/topics",
    "topic": "/topics/webhooks",
    "topic-due": "/topics/invoices",
    "next": "/topics/reports?tab=next",
    "leases": "/topics/thumbnails?tab=leases",
    "groups": "/topics/mail?tab=groups",
    "topic-schedules": "/topics/mail?tab=schedules",
    "partitions": "/topics/invoices?tab=partitions",
    "config": "/topics/webhooks?tab=config",
    "messages": "/messages?q=in",
    "message": "MESSAGE",
    "dead-topics": "/dead",
    "dead-reasons": "/dead?topic=signups",
    "dead-letters": "/dead?topic=signups&show=letters",
    "workers": "/workers",
    "schedules": "/schedules",
    "pipeline": "/pipeline",
    "keys": "/access",
    "audit": "/audit",
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, chromium: Any) -> Iterator[ServerProcess]:
    """A server under the load of `heapline demo --serve`."""
    server = ServerProcess(tmp_path_factory.mktemp("loaded") / "data").start()
    key = server.data / "admin.key"
    command = [sys.executable, "-m", "heapline.cli.demo_load", f"127.0.0.1:{server.port}", str(key)]
    load = subprocess.Popen(command)
    with server.client() as hl:
        until(lambda: "exports" in {topic.name for topic in hl.list_topics()})
        hl.create_topic("imports", max_retries_default=0)
        hl.enqueue("imports", b'{"file": "customers.csv", "rows": 88412}', headers={"heapline-task": "imports.run"})
        (message,) = hl.pop("imports", 1, holder="imports-worker-1", wait=5.0)
        message.nack(reason=TRACEBACK)
        hl.create_topic("signups", max_retries_default=0)
        hl.enqueue_batch("signups", [Outgoing(b"{}", headers={"heapline-task": f"signups.{n % 2}"}) for n in range(9)])
        for n, message in enumerate(hl.pop("signups", 9, holder="signups-worker-1", wait=5.0)):
            message.nack(reason=f"TimeoutError: order {n} took 30 s" if n % 3 else "ValueError: email is empty")
        for topic in ("webhooks", "signups"):
            hl.record_audit(topic, datetime.now(UTC), 1200)
        hl.record_audit("imports", datetime.now(UTC), 310, early=2, refuted=["not_early"])
        until(lambda: points_span(hl) >= LOAD_SECONDS, LOAD_SECONDS + PATIENCE)
    yield server
    load.terminate()
    load.wait(PATIENCE)
    server.stop()


def points_span(hl: Any) -> int:
    """Return the seconds from the first point of the charts to the last."""
    times: list[int] = hl.stats_series().times
    return times[-1] - times[0] if times else 0


TRACEBACK = """Traceback (most recent call last):
  File "/srv/venv/lib/python3.13/site-packages/heapline/client/tasks/worker.py", line 210, in _run
    return await handler(message)
  File "/srv/app/tasks/imports.py", line 63, in run
    amount = Decimal(row["amount"])
decimal.InvalidOperation: [<class 'decimal.ConversionSyntax'>]"""


def address(server: ServerProcess, path: str) -> str:
    if path == "MESSAGE":
        with server.client() as hl:
            dead = hl.dlq_list("imports")[0].message_id
        path = f"/message?topic=imports&id={dead}"
    return server.url + path


def test_last_audit_is_a_badge_that_leads_to_all_audits(server: ServerProcess, log_in: Callable[..., Any]) -> None:
    until = datetime.now(UTC)
    with server.client() as hl:
        for topic in ("sound", "broken", "unaudited"):
            hl.create_topic(topic)
        hl.record_audit("sound", until, 1200)
        hl.record_audit("broken", until, 7, lost=3, early=1, refuted=["none_lost", "not_early"])
    page = log_in(server)
    alarm = page.locator("#alarms").get_by_role("link", name="broken its last audit found 3 lost")
    expect(alarm).to_be_visible()
    page.goto(server.url + "/topics/unaudited")
    expect(page.locator("#title")).to_be_visible()
    expect(page.locator("#title .audit")).to_have_count(0)
    page.goto(server.url + "/topics/broken")
    badge = page.locator("#title").get_by_role("link", name="Last audit: 3 lost, 0 doubled, 1 early, 2 promises broken")
    expect(badge).to_contain_text(until.strftime("up to %Y-%m-%d %H:%M:%S"))
    expect(badge.locator(".pill.dead")).to_be_visible()
    with server.client() as hl:
        hl.record_audit("broken", until, 9)
    expect(page.locator("#title .audit .pill.ok")).to_have_text("0 lost, 0 doubled, 0 early")  # the open page follows
    page.locator("#title .audit").click()
    expect(page).to_have_url(re.compile("/ui/pipeline#audits$"))
    row = page.get_by_role("row", name=re.compile("^sound"))
    expect(row).to_contain_text("0 lost, 0 doubled, 0 early")
    expect(row).to_contain_text("1\u202f200")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_is_complete_and_live(loaded: ServerProcess, log_in: Callable[..., Any], theme: str) -> None:
    page = log_in(loaded, color_scheme=theme)
    for name, path in PAGES.items():
        page.goto(address(loaded, path))
        expect(page.locator("main h1")).to_be_visible()
        assert not page.get_by_text("This did not work").count(), name
        if page.locator("#link").count():
            expect(page.locator("#link")).to_have_text("Live")
        if PICTURES:
            wait_for_figures(page)
            page.screenshot(path=f"{PICTURES}/{name}-{theme}.png")


def wait_for_figures(page: Any) -> None:
    """Wait until charts are drawn and rates are known, which takes two samples."""
    for chart in page.locator("rate-chart").all():
        expect(chart.locator("canvas")).to_be_visible()
    if "tab=leases" in page.url:
        expect(page.locator("#leases tr").first).to_be_visible()
    if page.locator("#topics tr").count():
        expect(page.locator("#topics tr td.rate").first).not_to_have_text("–")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_fault_on_any_page(loaded: ServerProcess, log_in: Callable[..., Any], theme: str) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is missing; run python hatch_build.py with npm, and a registry that it can reach")
    page = log_in(loaded, color_scheme=theme)
    page.route("**/static/axe.js", lambda route: route.fulfill(body=axe_script(), content_type="text/javascript"))
    for name, path in PAGES.items():
        page.goto(address(loaded, path))
        expect(page.locator("main h1")).to_be_visible()
        assert not serious_faults(page), name


def axe_script() -> str:
    """Return axe-core, and a call that leaves its result in the page: a script of the page's own server, as the policy
    wants."""
    run = """
    axe.run(document, {resultTypes: ["violations", "passes"]}).then(({violations, passes}) => {
      const result = document.createElement("pre");
      result.id = "axe-result";
      const faults = violations.filter((each) => ["serious", "critical"].includes(each.impact));
      result.textContent = JSON.stringify({
        passes: passes.length,
        faults: faults.map((each) => [each.id, each.nodes.length, each.nodes[0].html.slice(0, 200)]),
      });
      document.body.append(result);
    });"""
    return AXE.read_text() + run


def serious_faults(page: Any) -> list[Any]:
    page.add_script_tag(url="/ui/static/axe.js")
    result = page.locator("#axe-result")
    result.wait_for(state="attached")
    found = json.loads(result.text_content())
    assert found["passes"] > 10
    faults: list[Any] = found["faults"]
    return faults


def test_pages_fit_a_phone(loaded: ServerProcess, log_in: Callable[..., Any]) -> None:
    page = log_in(loaded)
    page.set_viewport_size({"width": 360, "height": 740})
    for name, path in PAGES.items():
        page.goto(address(loaded, path))
        box = page.locator("main").bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 361, name
        heads = page.locator("main .scroll thead th")
        if heads.count():
            expect(heads.first).to_be_visible()
        if PICTURES and name in ("overview", "topic"):
            wait_for_figures(page)
            page.screenshot(path=f"{PICTURES}/{name}-phone.png")


def test_keyboard_reaches_everything_that_is_needed_first(loaded: ServerProcess, log_in: Callable[..., Any]) -> None:
    page = log_in(loaded)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    page.locator("body").press("/")
    expect(page.get_by_label("Message id or topic")).to_be_focused()
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("g")
    page.keyboard.press("d")
    expect(page).to_have_url(re.compile("/ui/dead$"))
    page.keyboard.press("?")
    expect(page.get_by_role("heading", name="Keyboard")).to_be_visible()
    page.get_by_label("Turn single-key shortcuts off").check()
    page.get_by_role("button", name="Close").click()
    page.keyboard.press("g")
    page.keyboard.press("o")
    expect(page).to_have_url(re.compile("/ui/dead$"))


def test_filters_sorts_and_pages_are_in_the_address(loaded: ServerProcess, log_in: Callable[..., Any]) -> None:
    page = log_in(loaded)
    expect(page.locator("#topics td.trend polyline").first).to_be_visible()
    page.goto(loaded.url + "/topics")
    page.get_by_role("link", name="Ready").click()
    expect(page).to_have_url(re.compile("sort=ready"))
    expect(page.get_by_role("columnheader", name=re.compile("Ready"))).to_have_attribute("aria-sort", "descending")
    page.get_by_label("Filter by name").fill("hook")
    page.get_by_role("button", name="Filter").click()
    expect(page).to_have_url(re.compile("q=hook"))
    expect(page.locator("#topics tr")).to_have_count(1)
    page.go_back()
    expect(page.locator("#topics tr")).not_to_have_count(1)
