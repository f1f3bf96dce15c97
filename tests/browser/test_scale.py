"""A thousand topics, a million messages and 200 000 dead letters: pages stay short, live and complete."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import heapline
from heapline import Backoff, Outgoing
from tests.browser.conftest import ServerProcess, expect

pytestmark = pytest.mark.slow
TOPICS, MESSAGES, DEAD = 1000, 1_000_000, 200_000
BATCH = 5000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, chromium: Any) -> Iterator[ServerProcess]:
    """A server on a directory that was filled before it started."""
    data = tmp_path_factory.mktemp("large") / "data"
    with heapline.open_sync(str(data)) as hl:
        for n in range(TOPICS - 2):
            hl.create_topic(f"topic-{n:04}")
        hl.create_topic("full")
        for first in range(0, MESSAGES, BATCH):
            hl.enqueue_batch("full", [Outgoing(b"order %d" % n, priority=n % 100) for n in range(first, first + BATCH)])
        hl.create_topic("died", max_retries_default=0, backoff=Backoff(base=0.0))
        for first in range(0, DEAD, BATCH):
            hl.enqueue_batch("died", [Outgoing(b"order %d" % n) for n in range(first, first + BATCH)])
            while leased := hl.pop("died", BATCH):
                hl.nack(leased, reason=f"TimeoutError: shard {first // BATCH % 2} took {first} s")
    server = ServerProcess(data).start()
    yield server
    server.stop()


def test_lists_have_fifty_rows_that_the_server_sorts_and_filters(
    large: ServerProcess, log_in: Callable[..., Any]
) -> None:
    page = log_in(large)
    rows = page.locator("#topics tr")
    expect(rows).to_have_count(50)
    expect(rows.first).to_contain_text("full")
    expect(rows.first).to_contain_text("1 M")
    expect(page.locator("#tiles")).to_contain_text("200 k")
    page.get_by_role("link", name="Topics", exact=True).click()
    expect(page.locator("main")).to_contain_text("1 to 50 of 1 000")
    page.get_by_role("link", name="Next").click()
    expect(page.locator("main")).to_contain_text("51 to 100 of 1 000")
    expect(rows).to_have_count(50)
    page.get_by_role("link", name="Dead", exact=True).click()
    expect(rows.first).to_contain_text("died")
    page.get_by_label("Filter by name").fill("topic-099")
    page.get_by_role("button", name="Filter").click()
    expect(rows).to_have_count(8)
    expect(page.locator("#link")).to_have_text("Live")


def test_a_million_messages_are_explained_searched_in_parts_and_counted(
    large: ServerProcess, log_in: Callable[..., Any]
) -> None:
    page = log_in(large)
    page.goto(large.url + "/topics/full")
    expect(page.locator("#tiles")).to_contain_text("1 M")
    expect(page.locator("#now")).to_contain_text("50 to 99")
    page.get_by_role("link", name="Next", exact=True).click()
    expect(page.locator("#next tr")).to_have_count(50)
    page.goto(large.url + "/messages?topic=full&q=order+45678&state=ready")
    expect(page.locator("main")).to_contain_text("of 1 M messages")
    expect(page.locator("main tbody tr")).to_have_count(0)
    for _ in range(10):
        if page.get_by_text("order 45678", exact=True).count():
            break
        page.get_by_role("link", name="Read on").click()
        expect(page.locator("main")).to_contain_text("of 1 M messages")
    expect(page.locator("main tbody tr")).to_have_count(1)
    page.get_by_role("link", name=re.compile("^0")).click()
    expect(page.locator("#sentence")).to_contain_text("in line")
    page.goto(large.url + "/topics/full")
    page.get_by_role("button", name="Purge").click()
    expect(page.locator("#dialog").get_by_role("button", name="Purge 1 M")).to_be_visible()


def test_dead_letters_of_many_are_grouped_paged_and_replayed_by_reason(
    large: ServerProcess, log_in: Callable[..., Any]
) -> None:
    page = log_in(large)
    page.goto(large.url + "/dead?topic=died")
    expect(page.locator("#reasons tr")).to_have_count(1)
    expect(page.locator("#reasons")).to_contain_text("200 k")
    page.get_by_role("link", name="Letters", exact=True).click()
    letters = page.locator("#letters tr")
    expect(letters).to_have_count(50)
    before = letters.first.text_content()
    page.get_by_role("link", name="Next").click()
    expect(letters).to_have_count(50)
    expect(letters.first).not_to_have_text(before or "")
    page.get_by_label("Reason contains").fill("shard 1 took 5000 s")
    page.get_by_role("button", name="Filter").click()
    expect(letters).to_have_count(50)
    page.get_by_role("button", name="Replay all that match").click()
    page.locator("#dialog").get_by_role("button", name=re.compile("Replay 5.000")).click()
    expect(page.locator("#toasts")).to_contain_text(re.compile("Replayed 5.000 dead letters"))
    with large.client() as hl:
        assert (hl.stats("died").ready, hl.stats("died").dead) == (5000, DEAD - 5000)
