"""The view `messages`: every enqueued message once, with all its fields."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest
from heapline.contract.ids import to_ulid
from heapline.contract.message import Outgoing, from_ms
from heapline.journal.log_bounds import log_start_path
from tests.unit.engine.rig import Rig, opened
from tests.unit.engine.test_maintenance import churn, reclaim
from tests.unit.spark.log_rig import planned, read_work, rows, table, values

TEXT = st.text(min_size=1, max_size=12).filter(lambda t: t.encode("utf-8", "ignore") == t.encode("utf-8", "replace"))


@st.composite
def outgoings(draw: Any) -> Outgoing:
    maybe = draw(st.sampled_from(["none", "delay", "at"]))
    return Outgoing(
        draw(st.binary(max_size=40)), draw(st.integers(-1000, 1000)), draw(st.none() | TEXT),
        draw(st.integers(1, 100)) if maybe == "delay" else None,
        datetime(2026, 6, 1, tzinfo=UTC) + timedelta(seconds=draw(st.integers(0, 99))) if maybe == "at" else None,
        draw(st.none() | st.dictionaries(TEXT, TEXT, max_size=3)), draw(st.none() | st.integers(1, 50)),
        draw(st.none() | st.integers(0, 250)), fairness_key=draw(st.none() | TEXT),
    )  # fmt: skip


async def enqueued(rig: Rig, batches: list[list[Outgoing]]) -> dict[int, Outgoing]:
    found: dict[int, Outgoing] = {}
    for batch in batches:
        found |= {e.id: m for e, m in zip(await rig.hl.enqueue_batch("jobs", batch), batch, strict=True)}
    return found


@settings(max_examples=20)
@given(st.lists(st.lists(outgoings(), min_size=1, max_size=6), min_size=1, max_size=4))
async def test_every_field_of_a_message_is_in_its_column(batches: list[list[Outgoing]]) -> None:
    async with opened(topic={"partitions": 3, "fairness": "keys"}) as rig:
        sent = await enqueued(rig, batches)
        now, suffix = from_ms(rig.clock.wall_ms()), rig.hl.topics.topic_info("jobs").id_suffix
        found = rows(rig, includeHeaders="true")
        assert sorted(row["id"] for row in found) == sorted(sent)
        for row in found:
            message = sent[row["id"]]
            key = None if message.key is None else message.key.encode()
            assert (row["key"], row["value"], row["priority"]) == (key, message.payload, message.priority)
            pairs = [{"key": k, "value": v.encode()} for k, v in (message.headers or {}).items()]
            assert row["headers"] == (pairs or None)
            assert row["message_id"] == to_ulid(row["id"], suffix)
            assert row["enqueued_at"] == row["timestamp"] == now
            due = now + timedelta(seconds=message.delay, milliseconds=1) if message.delay else message.deliver_at
            assert row["deliver_at"] == due
            life = None if message.ttl is None else timedelta(seconds=message.ttl)
            assert row["expires_at"] == (None if life is None else (due or now) + life)
            assert (row["max_retries"], row["fairness_key"]) == (message.max_retries, message.fairness_key)
            assert (row["topic"], row["timestampType"], row["batch_id"]) == ("jobs", 1, None)


async def test_columns_option_selects_and_orders_columns() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x", priority=7)
        assert table(rig, columns="priority, value").to_pydict() == {"priority": [7], "value": [b"x"]}
        with pytest.raises(BadRequest, match=r"does not have a column 'valu'; it has key, value"):
            table(rig, columns="valu")


async def test_prepared_messages_appear_at_their_commit_and_aborted_never() -> None:
    async with opened() as rig:
        await rig.hl.prepare_batch("b", "p1", [Outgoing(b"one"), Outgoing(b"two")], topic="jobs")
        await rig.hl.prepare_batch("b", "lost", [Outgoing(b"never")], topic="jobs")
        await rig.hl.prepare_batch("c", "p", [Outgoing(b"aborted")], topic="jobs")
        await rig.hl.enqueue("jobs", b"between")
        assert values(rig) == [b"between"]
        between = rows(rig)[0]["offset"]
        await rig.hl.commit_batch("b", ["p1"])
        await rig.hl.abort_batch("c")
        found = rows(rig)
        assert [(r["value"], r["batch_id"]) for r in found] == [(b"between", None), (b"one", "b"), (b"two", "b")]
        assert [r["offset"] - between for r in found] == [0, 1, 2]


async def test_commit_is_complete_if_its_parts_precede_the_range() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        sent = [Outgoing(b"%d" % i, key=f"k{i}") for i in range(40)]
        await rig.hl.prepare_batch("b", "p1", sent[:20], topic="jobs")
        await rig.hl.prepare_batch("b", "p2", sent[20:], topic="jobs")
        await rig.hl.enqueue("jobs", b"x", key="k1")
        await rig.hl.commit_batch("b", ["p2", "p1"])
        whole = rows(rig)
        commits = [r for r in whole if r["batch_id"]]
        assert sorted(r["value"] for r in commits) == sorted(m.payload for m in sent)
        starts = {p: min(r["offset"] for r in commits if r["partition"] == p) + 3 for p in (0, 1)}
        asked = json.dumps({"jobs": starts})
        assert rows(rig, startingOffsets=asked) == [r for r in whole if r["offset"] >= starts[r["partition"]]]


async def test_moved_message_appears_once_at_its_own_row() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"stays", delay=100_000)
        await churn(rig)
        before = rows(rig)
        for _ in range(3):
            await reclaim(rig)
        assert rig.runner().maintenance.records_moved_total
        moved = [r for r in rows(rig, view="events") if r["kind"] == "moved"]
        assert moved
        assert not {r["value"] for r in rows(rig)} & {b"stays"}  # its own row went with its segment
        assert sum(r["value"] == b"stays" for r in before) == 1


async def test_prepared_message_is_found_after_its_record_moved() -> None:
    async with opened(rewrite_below=1.0) as rig:
        await rig.hl.prepare_batch("b", "p", [Outgoing(b"moved", key="k")], topic="jobs")
        await churn(rig)
        for _ in range(3):
            await reclaim(rig)
        assert rig.runner().maintenance.records_moved_total
        await rig.hl.commit_batch("b", ["p"])
        assert values(rig)[-1] == b"moved"
        end = rows(rig)[-1]["offset"]
        assert values(rig, startingOffsets=json.dumps({"jobs": {0: end}})) == [b"moved"]


async def test_missing_records_of_a_commit_fail_a_read_not_from_the_start() -> None:
    async with opened() as rig:
        await rig.hl.prepare_batch("b", "p", [Outgoing(b"gone", priority=-200)], topic="jobs")
        await churn(rig, 40)  # the commit will lie in another segment
        await rig.hl.commit_batch("b", ["p"])
        await rig.hl.ack(await rig.hl.pop("jobs"))
        first = rows(rig)[-1]["offset"]
        assert values(rig)[-1] == b"gone"
        for _ in range(2):
            await rig.hl.enqueue("jobs", b"mark", priority=-1)
            await rig.hl.ack(await rig.hl.pop("jobs"))
            await rig.hl.snapshot("jobs")
        await rig.runner().maintenance.reclaim()
        assert rig.runner().maintenance.segments_reclaimed_total
        rig.disk.unlink(log_start_path(rig.runner().loader.directory))  # journals from before have no such file
        assert "gone" not in str(values(rig))
        asked = {"startingOffsets": json.dumps({"jobs": {0: first}})}
        with pytest.raises(BadRequest, match="reclaimed with the start"):
            rows(rig, **asked)
        assert values(rig, failOnDataLoss="false", **asked) == [b"mark", b"mark"]
        assert rows(rig, view="events", failOnDataLoss="false", **asked)[0]["kind"] == "batch_committed"


@settings(max_examples=8)
@given(st.data())
async def test_rows_are_the_same_however_a_range_is_split(data: Any) -> None:
    async with opened(topic={"partitions": 2}) as rig:
        for i in range(30):
            batch = [Outgoing(bytes([i]) * 300, key=f"k{j}") for j in range(40)]
            await rig.hl.enqueue_batch("jobs", batch)
            if i % 7 == 3:
                await rig.hl.ack(await rig.hl.pop("jobs", 30))
        whole = table(rig)
        ends = (await rig.hl.offsets("jobs")).items()
        ranges = {p: sorted(data.draw(st.lists(st.integers(0, e), min_size=2, max_size=2))) for p, (_, e) in ends}
        starts, stops = (json.dumps({"jobs": {p: r[i] for p, r in ranges.items()}}) for i in (0, 1))
        asked = {"startingOffsets": starts, "endingOffsets": stops}
        work, options = planned(rig, maxPartitionBytes=str(data.draw(st.integers(1, 1 << 20))), **asked)
        found = read_work(rig, work, options).sort_by([("partition", "ascending"), ("offset", "ascending")])
        low = np.array([ranges[p][0] for p in whole["partition"].to_pylist()])
        high = np.array([ranges[p][1] for p in whole["partition"].to_pylist()])
        offsets = whole["offset"].to_numpy()
        assert found.equals(whole.filter((offsets >= low) & (offsets < high)))
