"""Changes that people make: each action by clicking, with its dialog and its effect on the queue."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from heapline import Backoff, Outgoing
from tests.browser.conftest import expect

pytestmark = pytest.mark.slow
FAILS_ONCE = {"max_retries_default": 0, "backoff": Backoff(base=0.0)}


def act(page: Any, button: str, confirm: str | None = None, **fields: str) -> None:
    """Click a button of the page, fill its dialog in, and confirm."""
    page.get_by_role("button", name=button, exact=True).click()
    dialog = page.locator("#dialog")
    for label, text in fields.items():
        dialog.get_by_label(label.replace("_", " ")).fill(text)
    dialog.locator("button.primary").click()
    expect(dialog).to_be_hidden()
    if confirm:
        expect(page.locator("#toasts")).to_contain_text(confirm)


def bury(hl: Any, topic: str, count: int, reason: str = "it failed") -> None:
    hl.create_topic(topic, **FAILS_ONCE)
    hl.enqueue_batch(topic, [Outgoing(b"payload %d" % n) for n in range(count)])
    for message in hl.pop(topic, count):
        message.nack(reason=reason)


def test_topic_is_created_paused_resumed_and_configured(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    page.goto(server.url + "/topics")
    page.get_by_role("button", name="Create topic").click()
    page.get_by_label("Name", exact=True).fill("made-here")
    page.locator("#dialog button.primary").click()
    expect(page).to_have_url(re.compile("/ui/topics/made-here$"))
    act(page, "Pause", "Paused made-here")
    expect(page.locator("#title .pill")).to_have_text("Paused")
    page.get_by_role("link", name="Audit entry").click()
    row = page.get_by_role("row", name=re.compile("Pause"))
    expect(row).to_contain_text("made-here")
    page.goto(server.url + "/topics/made-here?tab=config")
    act(page, "Resume", "Resumed made-here")
    act(page, "Change max_backlog", "max_backlog of made-here is now 500", Value="500")
    expect(page.get_by_role("row", name=re.compile("max_backlog"))).to_contain_text("500")
    with server.client() as hl:
        assert hl.get_topic("made-here").config.max_backlog == 500


def test_dialog_keeps_what_was_entered_when_the_server_refuses(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    page.goto(server.url + "/topics")
    page.get_by_role("button", name="Create topic").click()
    page.get_by_label("Name", exact=True).fill("not a name")
    page.locator("#dialog button.primary").click()
    expect(page.get_by_role("alert")).to_contain_text("not a name")
    expect(page.get_by_label("Name", exact=True)).to_have_value("not a name")


def test_purge_removes_what_it_counted_and_needs_the_name_of_the_topic(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    with server.client() as hl:
        hl.create_topic("purged")
        hl.enqueue_batch("purged", [Outgoing(b"x")] * 12)
        page.goto(server.url + "/topics/purged")
        page.get_by_role("button", name="Purge").click()
        dialog = page.locator("#dialog")
        dialog.get_by_label("Type purged to confirm").fill("purge")
        dialog.get_by_role("button", name="Purge 12").click()
        expect(dialog.get_by_role("alert")).to_contain_text("nothing was changed")
        assert hl.stats("purged").ready == 12
        expect(dialog.get_by_role("button", name="Purge 12")).to_be_visible()
        hl.enqueue_batch("purged", [Outgoing(b"later")] * 3)  # after the dialog has counted
        dialog.get_by_label("Type purged to confirm").fill("purged")
        dialog.get_by_role("button", name="Purge 12").click()
        expect(page.locator("#toasts")).to_contain_text("Removed 12 messages")
        expect(page.locator("#tiles")).to_contain_text("Ready3")
        assert [message.payload for message in hl.pop("purged", 9)] == [b"later"] * 3


def test_selected_dead_letters_are_replayed_and_deleted(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    with server.client() as hl:
        bury(hl, "died", 5, "ValueError: bad invoice")
        page.goto(server.url + "/dead")
        page.get_by_role("link", name="died").click()
        expect(page.get_by_role("row", name=re.compile("ValueError: bad invoice"))).to_contain_text("5")
        page.get_by_role("link", name="Letters", exact=True).click()
        expect(page.get_by_text("ValueError: bad invoice")).to_have_count(5)
        boxes = page.get_by_role("checkbox", name=re.compile("Select 0"))
        boxes.nth(0).check()
        boxes.nth(1).check()
        act(page, "Replay 2", "Replayed 2 dead letters")
        expect(boxes).to_have_count(3)
        page.get_by_role("checkbox", name="Select all on this page").check()
        act(page, "Delete 3", "Deleted 3 dead letters", Type_died_to_confirm="died")
        stats = hl.stats("died")
        assert (stats.ready, stats.dead) == (2, 0)


def test_one_message_is_found_by_its_id_explained_and_rescheduled(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    with server.client() as hl:
        hl.create_topic("found")
        info = hl.enqueue("found", b'{"n": 9007199254740993}', priority=9007199254740993, headers={"tenant": "acme"})
        page.get_by_label("Message id or topic").fill(info.message_id)
        page.keyboard.press("Enter")
        page.get_by_role("link", name=info.message_id).click()
        expect(page.locator("#sentence")).to_contain_text("Next in line")
        expect(page.locator("pre.payload")).to_contain_text("9007199254740993")
        expect(page.locator("#facts")).to_contain_text("9\u202f007\u202f199\u202f254\u202f740\u202f993")
        act(page, "Reschedule", "Rescheduled the message", Seconds_from_now="3600")
        expect(page.locator("#title .pill")).to_have_text("delayed")
        page.get_by_role("link", name="Hex").click()
        expect(page.locator("pre.payload")).to_contain_text("7b 22 6e 22")
        act(page, "Cancel", "Cancelled the message")
        assert hl.get("found", info.id).state == "cancelled"


def test_key_is_shown_once_used_and_revoked_under_its_own_session(
    server: Any, log_in: Callable[..., Any], watch: Any
) -> None:
    page = log_in(server)
    page.goto(server.url + "/access")
    page.get_by_role("button", name="Create key").click()
    page.get_by_label("Name", exact=True).fill("ci")
    page.get_by_label("Scopes").fill("*:produce,consume,admin")
    page.locator("#dialog button.primary").click()
    secret = page.locator("#dialog code").inner_text()
    page.get_by_role("button", name="I have stored it").click()
    other = log_in(server, secret)
    expect(other.locator("#link")).to_have_text("Live")
    page.get_by_role("row", name=re.compile("^ci")).get_by_role("button", name="Revoke").click()
    page.locator("#dialog button.primary").click()
    expect(page.get_by_role("row", name=re.compile("^ci"))).to_contain_text("revoked")
    expect(other.locator("#link")).to_contain_text("Signed out")
    other.goto(server.url + "/topics")
    expect(other.get_by_label("API key")).to_be_visible()


def test_logout_in_one_tab_ends_the_others(
    server: Any, log_in: Callable[..., Any], new_page: Callable[..., Any]
) -> None:
    page = log_in(server)
    other = new_page(beside=page)
    other.goto(server.url + "/topics")
    expect(other.locator("#link")).to_have_text("Live")
    page.get_by_role("button", name="Log out").click()
    expect(other.locator("#link")).to_contain_text("Signed out")


def test_schedule_is_created_run_and_paused(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    with server.client() as hl:
        hl.create_topic("scheduled")
        page.goto(server.url + "/schedules")
        page.get_by_role("button", name="Create schedule").click()
        dialog = page.locator("#dialog")
        dialog.get_by_label("Name", exact=True).fill("nightly")
        dialog.get_by_label("Topic", exact=True).fill("scheduled")
        dialog.get_by_label("Cron", exact=True).fill("0 3 * * *")
        dialog.locator("button.primary").click()
        expect(page.get_by_role("row", name=re.compile("^nightly"))).to_be_visible()
        act(page, "Run now", "Enqueued the message of nightly")
        assert hl.stats("scheduled").ready == 1
        act(page, "Pause", "Paused nightly")
        expect(page.get_by_role("row", name=re.compile("^nightly"))).to_contain_text("paused")
        page.goto(server.url + "/topics/scheduled?tab=schedules")
        act(page, "Resume", "Resumed nightly")
        expect(page.get_by_role("row", name=re.compile("^nightly"))).not_to_contain_text("paused")


def test_two_operators_see_each_others_changes(server: Any, log_in: Callable[..., Any]) -> None:
    with server.client() as hl:
        hl.create_topic("both")
    one, other = log_in(server), log_in(server)
    one.goto(server.url + "/topics/both")
    other.goto(server.url + "/topics/both")
    act(one, "Pause", "Paused both")
    expect(other.locator("#title .pill")).to_have_text("Paused")
    act(other, "Resume", "Resumed both")
    expect(one.locator("#title .pill")).to_have_count(0)


def test_read_only_dashboard_hides_and_refuses_changes(
    own_server: Callable[..., Any], log_in: Callable[..., Any]
) -> None:
    server = own_server("--read-only")
    with server.client() as hl:
        hl.create_topic("kept")
    page = log_in(server)
    page.goto(server.url + "/topics/kept")
    expect(page.get_by_role("link", name="Config")).to_be_visible()
    assert page.locator(".button[hx-get]").count() == 0
    cookies = {cookie["name"]: cookie["value"] for cookie in page.context.cookies()}
    answer = httpx.post(f"{server.url}/do/pause?topic=kept", cookies=cookies, trust_env=False)
    assert answer.status_code == 400
    assert "read-only" in answer.text
    with server.client() as hl:
        assert not hl.stats("kept").paused


def test_leases_show_their_holders_and_are_ended_by_selection(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    with server.client() as hl:
        hl.create_topic("held", backoff=Backoff(base=0.0))
        hl.enqueue_batch("held", [Outgoing(b"x")] * 3)
        hl.pop("held", 2, holder="worker-7", visibility=600.0)
        page.goto(server.url + "/workers")
        page.get_by_role("link", name="worker-7").click()
        boxes = page.get_by_role("checkbox", name=re.compile("Select 0"))
        expect(boxes).to_have_count(2)
        boxes.nth(0).check()
        act(page, "End 1", "Ended 1 lease of held", Reason="stuck")
        expect(boxes).to_have_count(1)
        assert hl.stats("held").leased == 1


def test_message_tells_its_life_from_the_journal(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    with server.client() as hl:
        hl.create_topic("lived", backoff=Backoff(base=0.0), max_retries_default=1)
        info = hl.enqueue("lived", b"x")
        hl.pop("lived", 1, holder="worker-1")[0].nack(reason="first failure")
        (message,) = hl.pop("lived", 1, holder="worker-2")
        page.goto(f"{server.url}/message?topic=lived&id={info.message_id}")
        steps = page.locator(".timeline li")
        expect(steps.nth(1)).to_contain_text("Leased by worker-1")
        expect(steps.nth(2)).to_contain_text("first failure")
        expect(steps.nth(3)).to_contain_text("Leased by worker-2, delivery 2")
        message.ack()
        expect(steps.nth(4)).to_contain_text("Done")


def test_messages_are_found_by_text_key_and_header(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    with server.client() as hl:
        hl.create_topic("searched")
        hl.enqueue_batch("searched", [Outgoing(b"order %d" % n, key=f"key-{n}") for n in range(20)])
        hl.enqueue("searched", b"a needle in hay", headers={"tenant": "acme"})
    page.goto(server.url + "/messages")
    page.get_by_label("Message id, topic or text").fill("needle")
    page.get_by_label("Topic to search").select_option("searched")
    page.get_by_role("button", name="Find").click()
    expect(page.locator("main")).to_contain_text("Read 21 of 21 messages")
    expect(page.locator("main tbody tr")).to_have_count(1)
    expect(page.locator("main tbody tr")).to_contain_text("a needle in hay")
    page.goto(server.url + "/messages?topic=searched&key=key-7")
    expect(page.locator("main tbody tr")).to_contain_text("key-7")
    page.goto(server.url + "/messages?topic=searched&header=tenant%3Dacme&state=ready")
    expect(page.locator("main tbody tr")).to_have_count(1)
    page.goto(server.url + "/messages?topic=searched&header=tenant%3Dacme&state=dead")
    expect(page.locator("main")).to_contain_text("Nothing found")


def test_dead_letters_of_one_reason_are_replayed_as_of_the_dialog(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    with server.client() as hl:
        bury(hl, "reasons", 4, "TimeoutError: order 17 took 30 s")
        bury(hl, "reasons", 2, "ValueError: no amount")
        page.goto(server.url + "/dead?topic=reasons")
        rows = page.locator("#reasons tr")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text("TimeoutError")
        rows.first.get_by_role("button", name="Replay").click()
        dialog = page.locator("#dialog")
        expect(dialog.get_by_role("button", name="Replay 4")).to_be_visible()
        bury(hl, "reasons", 1, "TimeoutError: order 18 took 30 s")  # died after the dialog opened
        dialog.get_by_role("button", name="Replay 4").click()
        expect(page.locator("#toasts")).to_contain_text("Replayed 4 dead letters")
        expect(rows).to_have_count(2)
        stats = hl.stats("reasons")
        assert (stats.ready, stats.dead) == (4, 3)
        act(page, "Delete all", "Deleted 3 dead letters", Type_reasons_to_confirm="reasons")
        assert hl.stats("reasons").dead == 0


def test_pause_is_undone_from_its_note(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    with server.client() as hl:
        hl.create_topic("undone")
        page.goto(server.url + "/topics/undone")
        act(page, "Pause", "Paused undone")
        page.get_by_role("button", name="Undo").click()
        page.locator("#dialog button.primary").click()
        expect(page.locator("#title .pill")).to_have_count(0)
        assert not hl.stats("undone").paused


def test_partition_is_released_and_a_snapshot_is_written(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    with server.client() as hl:
        hl.create_topic("parts", partitions=2)
        hl.enqueue("parts", b"x")
        page.goto(server.url + "/topics/parts?tab=partitions")
        first = page.get_by_role("row", name=re.compile("^0"))
        first.get_by_role("button", name="Throttle").click()
        page.locator("#dialog button.primary").click()
        expect(first).to_contain_text("Throttled")
        act(page, "Release", "Partition 0 of parts is released")
        expect(first).not_to_contain_text("Throttled")
        assert hl.stats("parts").partitions[0].throttled is None
        expect(page.locator("#storage")).to_contain_text("Snapshotnone")
        act(page, "Snapshot now", "Wrote a snapshot of parts")
        expect(page.locator("#storage")).to_contain_text("Snapshot ageunder 1")
        assert hl.stats("parts").log.snapshot_bytes > 0


def test_group_is_moved_back_and_deleted(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    with server.client() as hl:
        hl.create_topic("read")
        hl.create_group("read", "billing", start="latest")
        hl.enqueue_batch("read", [Outgoing(b"x")] * 3)
        hl.reset_offsets("read", "billing", to="latest")
        page.goto(server.url + "/topics/read?tab=groups")
        row = page.get_by_role("row", name=re.compile("^billing"))
        act(page, "Move", "Group billing continues from earliest", To="earliest")
        expect(row).to_contain_text("3")
        assert hl.get_group("read", "billing").lag == 3
        page.get_by_role("button", name="Undo").click()
        page.locator("#dialog button.primary").click()
        expect(page.locator("#toasts")).to_contain_text("Group billing continues from {")
        assert hl.get_group("read", "billing").lag == 0
        act(page, "Delete", "Deleted group billing of read", Type_read_to_confirm="read")
        expect(row).to_have_count(0)
        assert not hl.list_groups("read")


def test_user_is_created_changed_disabled_and_enabled(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    page.goto(server.url + "/access?tab=users")
    act(
        page,
        "Create user",
        "Created bo@example.org",
        Email="bo@example.org",
        Password="a long password",
        Scopes="a:consume",
    )
    row = page.get_by_role("row", name=re.compile("^bo@example.org"))
    expect(row).to_contain_text("a:consume")
    row.get_by_role("button", name="Change").click()
    page.locator("#dialog").get_by_label("Scopes").fill("b:consume")
    page.locator("#dialog button.primary").click()
    expect(row).to_contain_text("b:consume")
    row.get_by_role("button", name="Disable").click()
    page.locator("#dialog button.primary").click()
    expect(row).to_contain_text("disabled")
    row.get_by_role("button", name="Enable").click()
    page.locator("#dialog button.primary").click()
    expect(row).not_to_contain_text("disabled")


def test_replay_is_cancelled_and_a_schedule_and_a_topic_are_deleted(server: Any, log_in: Callable[..., Any]) -> None:
    page = log_in(server)
    with server.client() as hl:
        hl.create_topic("ended")
        hl.create_topic("ended-again")
        hl.enqueue_batch("ended", [Outgoing(b"x")] * 50)
        hl.create_group("ended", "archive")
        hl.start_replay("slow", "ended", into="ended-again", start="earliest", rate=0.1)
        page.goto(server.url + "/pipeline")
        expect(page.locator("main")).to_contain_text("heapline pipeline audit --topic ended")
        row = page.get_by_role("row", name=re.compile("^slow"))
        row.get_by_role("button", name="Cancel").click()
        page.locator("#dialog button.primary").click()
        expect(row).to_contain_text("cancelled")
        hl.create_schedule("hourly", topic="ended", payload=b"x", every=3600.0)
        page.goto(server.url + "/topics/ended?tab=schedules")
        page.get_by_role("row", name=re.compile("^hourly")).get_by_role("button", name="Delete").click()
        page.locator("#dialog button.primary").click()
        expect(page.locator("#toasts")).to_contain_text("Deleted hourly")
        assert not [schedule for schedule in hl.list_schedules() if schedule.name == "hourly"]
        page.goto(server.url + "/topics/ended")
        act(page, "Delete topic", Type_ended_to_confirm="ended")
        expect(page).to_have_url(re.compile("/ui/topics$"))
        assert "ended" not in {topic.name for topic in hl.list_topics()}
