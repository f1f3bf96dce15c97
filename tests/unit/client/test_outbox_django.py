"""The outbox in a Django project: its own models, migration, store and command."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import django
import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import connection, connections, transaction

import heapline
from heapline.outbox import OutboxRelay, sql
from heapline.outbox.django import enqueue, enqueue_call
from heapline.testing import HandClock, MemoryBroker, drain


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> None:
    name = str(tmp_path_factory.mktemp("django") / "app.db")
    settings.configure(
        INSTALLED_APPS=["heapline.outbox.django"], USE_TZ=True,
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": name}},
    )  # fmt: skip
    django.setup()
    call_command("migrate", verbosity=0)
    connections.close_all()


@pytest.fixture(autouse=True)
def emptied(project: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")  # these tests write from within an event loop
    yield
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM heapline_outbox")
    connections.close_all()


@pytest.fixture
async def hl() -> AsyncIterator[MemoryBroker]:
    async with MemoryBroker(HandClock()) as broker:
        await broker.create_topic("jobs")
        yield broker


def relay_of(hl: MemoryBroker, **settings: Any) -> OutboxRelay:
    from heapline.outbox.django import DjangoStore

    return OutboxRelay(DjangoStore(), hl, **settings)


def left() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM heapline_outbox")
        count: int = cursor.fetchone()[0]
    return count


async def test_call_of_a_task_is_written_in_the_transaction(hl: MemoryBroker) -> None:
    app = heapline.App(hl)

    @app.task(topic="jobs")
    async def double(number: int) -> int:
        return 2 * number

    with transaction.atomic():
        enqueue_call(double.item(4, priority=3))
    async with relay_of(hl) as relay:
        assert await relay.run_once() == 1
    assert [done.result for done in await drain(hl, app)] == [8]


async def test_committed_rows_are_enqueued_and_rolled_back_ones_are_not(hl: MemoryBroker) -> None:
    with transaction.atomic():
        enqueue("jobs", b"1", priority=3, key="k", headers={"a": "b"}, delay=60)
        enqueue("jobs", b"2", max_retries=1, ttl=9.5)
    transaction.set_autocommit(False)
    enqueue("jobs", b"never")
    transaction.rollback()
    transaction.set_autocommit(True)
    async with relay_of(hl) as relay:
        assert await relay.run_once() == 2
    first, second = hl.standing("jobs")
    assert (first.payload, first.priority, first.key, first.headers, first.state) == (
        b"1",
        3,
        "k",
        {"a": "b"},
        "delayed",
    )
    assert second.payload == b"2"
    assert left() == 0


async def test_rows_in_doubt_are_sent_again_under_the_same_numbers(hl: MemoryBroker) -> None:
    for i in range(10):
        enqueue("jobs", b"%d" % i)
    killed = relay_of(hl, batch_rows=4)
    await killed.turn()  # four are enqueued but not settled
    assert (len(hl.standing("jobs")), left()) == (4, 10)
    async with relay_of(hl, lease=-1) as relay:
        await relay.run_once()
        assert (relay.relayed, relay.failed) == (10, 0)
    assert [info.payload for info in hl.standing("jobs")] == [b"%d" % i for i in range(10)]


async def test_refused_row_stays_with_its_reason_and_free_rows_are_returned(hl: MemoryBroker) -> None:
    await hl.create_topic("small", max_payload_bytes=1)
    enqueue("small", b"12")
    enqueue("small", b"3")
    async with relay_of(hl) as relay:
        await relay.turn()  # rejects the first row
        newer = {"producer_id": relay._lanes[0].producer_id, "epoch": 1 << 61, "seq": 0}
        await hl.enqueue("small", b"0", **newer)  # as if another database had the same lane
        await relay.run_once()
        assert (relay.relayed, relay.failed) == (1, 1)
    with connection.cursor() as cursor:
        cursor.execute("SELECT error, lane FROM heapline_outbox")
        [(error, lane)] = cursor.fetchall()
    assert "PayloadTooLarge" in error
    assert lane is None


def test_command_relays_into_a_directory(tmp_path: Path) -> None:
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0) as broker:
        broker.create_topic("jobs", segment_bytes=1 << 20)
    enqueue("jobs", b"x")
    out = io.StringIO()
    call_command("heapline_relay", "--once", "--data", str(tmp_path / "data"), stdout=out)
    assert out.getvalue() == "1 message relayed\n"
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0) as broker:
        assert [m.payload for m in broker.pop("jobs")] == [b"x"]


def test_migration_matches_the_models() -> None:
    call_command("makemigrations", "heapline_outbox", check=True, dry_run=True, verbosity=0)


def test_tables_are_those_of_sqlalchemy() -> None:
    with connection.cursor() as cursor:
        for table in (sql.OUTBOX, sql.LANES):
            columns = {column.name for column in connection.introspection.get_table_description(cursor, table.name)}
            assert columns == {column.name for column in table.columns}


def test_bad_message_is_rejected_immediately() -> None:
    with pytest.raises(heapline.BadRequest, match="payload must be bytes"):
        enqueue("jobs", "text")  # type: ignore[arg-type]
    assert left() == 0
