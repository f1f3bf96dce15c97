"""The view `events`: every row of the log once, equal to the engine's own reading."""

from __future__ import annotations

import json
from datetime import UTC, timedelta
from typing import Any

import numpy as np
import pytest

from heapline.cli.journal.contents import Selection
from heapline.cli.journal.contents import rows as dumped
from heapline.cli.journal.topic_files import TopicFiles
from heapline.contract.config import Backoff
from heapline.contract.message import DlqFilter, Outgoing, from_ms
from heapline.core.events import KIND_NAMES, Enqueued, Event, Grant, Leased, Moved
from heapline.core.record import ROW
from heapline.journal.unit import Unit, UnitHeader
from heapline.spark.schema import columns_of
from heapline.spark.topic_log import TopicRef
from heapline.spark.views.events import EventBatches
from heapline.spark.views.messages import UnitRecords
from tests.unit.engine.rig import Rig, opened, settle
from tests.unit.engine.test_maintenance import churn, reclaim
from tests.unit.spark.log_rig import rows

GROUPS = {kind for kind in KIND_NAMES.values() if kind.startswith("group")}


async def live_through_everything(rig: Rig) -> None:
    """Something of every kind that happens to a topic."""
    hl = rig.hl
    sent = await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, i, key=f"k{i}", headers={"a": "b"}) for i in range(30)])
    await hl.enqueue_batch("jobs", [Outgoing(b"late", 50, delay=5, ttl=90), Outgoing(b"x", 45, ttl=1, max_retries=3)])
    got = await hl.pop("jobs", 6, holder="ann", visibility=30)
    got += await hl.pop("jobs", 4, visibility=10)
    await hl.ack(got[:2])
    await hl.nack(got[2:4], reason="no luck")
    await hl.release(got[4:5])
    await hl.extend(got[5:6], 60)
    await hl.bury(got[6:8], reason="bad")
    await hl.cancel("jobs", sent[20].id)
    await hl.reschedule("jobs", sent[21].id, priority=-5, delay=3)
    rig.clock.advance(20)
    await settle()
    await hl.stats("jobs")
    assert await hl.dlq_replay("jobs", where=DlqFilter(reason="bad")) == 2
    await hl.bury(await hl.pop("jobs", 2))
    await hl.dlq_delete("jobs", where=DlqFilter())
    await hl.prepare_batch("b", "p", [Outgoing(b"one", 3), Outgoing(b"two", 4, delay=2)], topic="jobs")
    await hl.prepare_batch("c", "p", [Outgoing(b"no")], topic="jobs")
    await hl.commit_batch("b", ["p"])
    await hl.abort_batch("c")
    await hl.open_producer("jobs", "p1")
    await hl.pause_topic("jobs")
    await hl.resume_topic("jobs")
    await hl.set_partition_throttled("jobs", 0, True, "slow")
    await hl.set_partition_throttled("jobs", 0, False)
    await hl.update_topic("jobs", visibility_default=31.0)
    await hl.update_topic("jobs", partitions=4)
    await hl.purge("jobs")


def naive(rig: Rig) -> list[dict[str, Any]]:
    folder = next(path.rpartition("/")[0] for path in rig.files(".seg") if "/jobs." in path)
    place = TopicFiles("jobs", folder, id_suffix=rig.hl.topics.topic_info("jobs").id_suffix)
    found = dumped(rig.disk, place, Selection(), running=True)
    return sorted(found, key=lambda row: (row["partition"], row["offset"]))


def moment(ms: int | None) -> Any:
    return from_ms(ms).astimezone(UTC) if ms else None


async def test_events_has_every_row_once_as_the_engine_reads_it() -> None:
    async with opened(topic={"partitions": 2, "backoff": Backoff(base=1.0, jitter=0.0)}) as rig:
        await live_through_everything(rig)
        found, expected = rows(rig, view="events"), naive(rig)
        ends = {p: end for p, (_, end) in (await rig.hl.offsets("jobs")).items()}
        assert [(r["partition"], r["offset"]) for r in found] == [(p, o) for p in sorted(ends) for o in range(ends[p])]
        for row, reported in zip(found, expected, strict=True):
            assert (row["partition"], row["offset"], row["unit"]) == (
                reported["partition"],
                reported["offset"],
                reported["unit"],
            )
            assert (row["kind"], row["id"], row["message_id"]) == (
                reported["kind"], reported.get("id"), reported.get("message_id"),
            )  # fmt: skip
            assert row["timestamp"] == moment(reported["time_ms"])
            for column in ("holder", "reason", "batch_id", "attempts", "returned"):
                assert row[column] == reported.get(column), (column, row, reported)
            assert row["deadline"] == moment(reported.get("deadline"))
            if row["kind"] != "batch_committed":  # which adds facts that are elsewhere in the log
                assert row["due"] == moment(reported.get("due"))
                assert row["priority"] == reported.get("priority")
        kinds = {row["kind"] for row in found}
        assert set(KIND_NAMES.values()) - GROUPS - kinds == {"moved"}


async def test_committed_message_has_the_columns_of_an_enqueued_one() -> None:
    async with opened() as rig:
        message = Outgoing(b"payload", 9, delay=60, ttl=5, max_retries=2)
        await rig.hl.enqueue_batch("jobs", [message])
        await rig.hl.prepare_batch("b", "p", [message], topic="jobs")
        await rig.hl.commit_batch("b", ["p"])
        new = [r for r in rows(rig, view="events") if r["kind"] in ("enqueued", "batch_committed")]
        facts = ("priority", "due", "expires_at", "max_retries", "payload_bytes", "turn")
        assert len({tuple(row[name] for name in facts) for row in new}) == 1
        assert (new[0]["payload_bytes"], new[0]["due"] - new[0]["at"]) == (7, timedelta(seconds=60, milliseconds=1))


async def test_topic_without_streams_or_compacted_has_counts_and_moves() -> None:
    async with opened(topic={"streams": False}) as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"late", delay=1)] * 3)
        sent = await rig.hl.enqueue("jobs", b"stays", delay=100_000)
        rig.clock.advance(2)
        await rig.hl.ack(await rig.hl.pop("jobs", 3))
        assert [r["count"] for r in rows(rig, view="events") if r["kind"] == "fired"] == [3]
        await churn(rig)
        for _ in range(2):
            await reclaim(rig)
        found = rows(rig, view="events")
        assert [r["id"] for r in found if r["kind"] == "moved"] == [sent.id]
        assert all(r["count"] is None for r in found if r["id"] is not None)


@pytest.mark.parametrize("secret", ["token", "position", "block"])
async def test_events_never_show_lease_tokens(secret: str) -> None:
    async with opened(topic={"partitions": 2}) as rig:
        await live_through_everything(rig)
        found = rows(rig, view="events")
        assert not any(secret in column for column in found[0])
        details = [json.loads(row["details"]) for row in found if row["details"] is not None]
        assert details
        assert not any(secret in name for reported in details for name in reported)


def of_type(annotation: Any, count: int) -> Any:
    """Some value for a field of an event with so many rows."""
    text = str(annotation)
    if "Column" in text or "ndarray" in text:
        return np.arange(count, dtype=np.int64) + 1
    if "list" in text:
        return []
    found = {"int": 1, "bool": True, "str": "text", "bytes": b'{"a":1}', "None": None}
    return next(value for name, value in found.items() if name in text)


@pytest.mark.parametrize("kind", KIND_NAMES, ids=lambda kind: kind.__name__)
def test_every_kind_of_event_has_its_rows(kind: type[Event]) -> None:
    said: dict[str, Any] = {}
    for owner in reversed(kind.__mro__):
        said |= vars(owner).get("__annotations__", {})
    hints = {name: said[name] for name in kind.__struct_fields__}
    fields = {name: of_type(hint, 3) for name, hint in hints.items()}
    by_row = ("delayed", "attempts", "ready", "again")
    fields |= {name: bytes(3) for name in by_row if name in fields and hints[name] == "bytes"}
    fields |= {name: 3 for name in ("count",) if name in fields}
    fields |= {name: np.zeros(0, dtype=np.int64) for name in ("leased",) if name in fields}
    fields |= {"grants": [Grant(3, 5, "ann", None)]} if kind is Leased else {}
    event: Any = kind(**fields)
    header = UnitHeader(0, 7, 6, 1000, 2000, 0, 1, 0, 0, 0)
    into = EventBatches(TopicRef("jobs", 1, 1), columns_of("events"))
    rows = np.zeros(3, dtype=ROW)
    rows["id"] = [1, 2, 3]
    brings = [UnitRecords(np.zeros(0, dtype=np.uint8), rows, 0)] if isinstance(event, Enqueued | Moved) else []
    into.add(event, brings, 2, 40, Unit(1, 512, header, [], [], memoryview(b"")), 0, event.rows())
    found = into.take().to_pylist()
    assert [row["offset"] for row in found] == list(range(40, 40 + event.rows()))
    assert {(row["kind"], row["partition"], row["unit"]) for row in found} == {(KIND_NAMES[kind], 2, 7)}
    if event.rows() > 1:
        assert [row["id"] for row in found] == [1, 2, 3]
    assert not any("token" in (row["details"] or "") for row in found)
