"""The blocking facade: the whole contract without `await`, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import heapline
from heapline.contract.message import DlqFilter, LeaseRef, Outgoing
from heapline.engine import SyncBroker

SMALL = {"segment_bytes": 1 << 20, "max_payload_bytes": 64 << 10}


@pytest.fixture
def hl(tmp_path: Path) -> Iterator[SyncBroker]:
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0) as broker:
        broker.create_topic("jobs", **SMALL)
        yield broker


def test_lazy_batch_is_settled_without_await(hl: SyncBroker) -> None:
    hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, priority=i) for i in range(6)])
    batch = hl.pop("jobs", 6, lazy=True)
    assert (len(batch), batch.payloads[2]) == (6, b"2")
    batch[0].ack()
    batch[1:3].ack()
    hl.release(batch[3:4])
    batch[4].nack(backoff=0)
    batch[5:].extend(60)
    batch[5:].bury("no")
    stats = hl.stats("jobs")
    assert (stats.ready, stats.leased, stats.dead, stats.acked_total) == (2, 0, 1, 3)
    hl.ack(hl.pop("jobs", 6, lazy=True))
    assert hl.stats("jobs").acked_total == 5


def test_whole_contract_without_await(hl: SyncBroker) -> None:
    r = hl.enqueue("jobs", b"payload", priority=5, key="k", headers={"k": "v"}, ttl=3600, max_retries=3)
    assert not r.duplicate
    hl.enqueue_batch("jobs", [Outgoing(b"a", priority=1), Outgoing(b"b", priority=2)], atomic=True)
    assert [info.payload for info in hl.peek("jobs", 10)] == [b"a", b"b", b"payload"]
    ms = hl.pop("jobs", max_messages=100, visibility=30.0, wait=5.0, holder="w", max_bytes=2 << 20)
    assert [m.payload for m in ms] == [b"a", b"b", b"payload"]
    assert (ms[2].key, ms[2].headers, ms[2].attempts, ms[2].topic) == ("k", {"k": "v"}, 1, "jobs")
    ms[0].extend(60.0)
    ms[0].ack()
    ms[1].nack(backoff=0, reason="again")
    ms[2].release()
    (b, payload) = hl.pop("jobs", 2)
    b.bury("no")
    assert [d.reason for d in hl.dlq_list("jobs", limit=5, where=DlqFilter(reason="no"))] == ["no"]
    assert hl.dlq_replay("jobs", ids=[b.id]) == 1
    hl.bury(hl.pop("jobs"))
    assert hl.dlq_delete("jobs", where=DlqFilter()) == 1
    hl.ack(payload)
    assert hl.get("jobs", r.message_id).state == "acked"
    late = hl.enqueue("jobs", b"late", delay=60)
    hl.reschedule("jobs", late.id, delay=0, priority=1)
    hl.cancel("jobs", late.id)
    hl.enqueue("jobs", b"x")
    assert hl.purge("jobs") == 1
    hl.pause_topic("jobs", until=datetime.now(UTC) + timedelta(hours=1))
    assert hl.stats("jobs").paused
    hl.resume_topic("jobs")
    hl.snapshot("jobs")
    assert hl.update_topic("jobs", max_backlog=9).config.max_backlog == 9
    assert [t.name for t in hl.list_topics()] == ["jobs"]
    start, end = hl.offsets("jobs")[0]
    frames = list(hl.read_log("jobs", partition=0, start=0, end=None))
    assert (start, end) == (0, frames[-1].offset + frames[-1].row_count)
    assert hl.open_producer("jobs", "p") == 1
    hl.enqueue("jobs", b"n", producer=heapline.Producer("p"))
    hl.delete_topic("jobs")
    assert hl.list_topics() == []


def test_errors_are_the_same(hl: SyncBroker) -> None:
    with pytest.raises(heapline.TopicNotFound):
        hl.pop("nope")
    hl.enqueue("jobs", b"x")
    (m,) = hl.pop("jobs")
    m.release()
    with pytest.raises(heapline.LeaseLost):
        m.ack()


def test_messages_are_accepted_in_any_collection_or_by_keyword(hl: SyncBroker) -> None:
    hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(7)])
    a, b, c, d, e, f, g = hl.pop("jobs", 7)
    hl.ack([a])
    hl.ack((b,))
    hl.ack(m for m in [c])
    hl.ack({d})
    hl.ack(messages=[e])
    hl.ack(LeaseRef("jobs", f.id, f.token))
    hl.ack([LeaseRef("jobs", g.id, g.token), a])
    assert hl.stats("jobs").acked_total == 7


def test_message_repr_shows_its_fields(hl: SyncBroker) -> None:
    hl.enqueue("jobs", b"x", priority=3)
    (m,) = hl.pop("jobs")
    assert m.message_id in repr(m)
    assert "priority 3" in repr(m)


def test_many_threads_share_one_broker(hl: SyncBroker) -> None:
    done: list[bytes] = []

    def work(number: int) -> None:
        for i in range(20):
            hl.enqueue("jobs", b"%d-%d" % (number, i))
        for _ in range(20):
            (m,) = hl.pop("jobs", wait=20.0)
            done.append(m.payload)
            m.ack()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == sorted(b"%d-%d" % (n, i) for n in range(4) for i in range(20))


def test_waiting_pop_wakes_for_an_enqueue_from_another_thread(hl: SyncBroker) -> None:
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.extend(m.payload for m in hl.pop("jobs", wait=60.0)))
    thread.start()
    hl.enqueue("jobs", b"x")
    thread.join(30)
    assert found == [b"x"]


def test_reopened_broker_keeps_everything(tmp_path: Path) -> None:
    for round_number in range(3):
        with heapline.open_sync(tmp_path, spare_segment_bytes=0) as hl:
            hl.create_topic("jobs", **SMALL)
            hl.enqueue("jobs", b"%d" % round_number)
            assert hl.stats("jobs").ready == round_number + 1


def test_closed_facade_raises_and_leaves_no_thread(tmp_path: Path) -> None:
    with heapline.open_sync(tmp_path, spare_segment_bytes=0) as hl:
        assert any(thread.name == "heapline" for thread in threading.enumerate())
    hl.close()
    assert not any(thread.name == "heapline" for thread in threading.enumerate())
    with pytest.raises(heapline.Closed, match=r"`with heapline\.open_sync"):
        hl.list_topics()
    with pytest.raises(heapline.Closed):
        heapline.open_sync(tmp_path).pop("jobs")


def test_facade_has_only_the_brokers_methods(hl: SyncBroker) -> None:
    with pytest.raises(AttributeError, match="frobnicate"):
        hl.frobnicate()
