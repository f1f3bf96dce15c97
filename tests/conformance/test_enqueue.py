"""Every option of `enqueue`, and every message that is rejected without changing anything."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import pytest

import heapline
from heapline.contract.broker import Broker
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, picture, put, take

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1


async def test_plain_enqueue_answers_with_both_spellings_of_the_id(jobs: Broker) -> None:
    r = await jobs.enqueue("jobs", b"hello")
    assert (r.duplicate, r.error) == (False, None)
    m = await take(jobs)
    assert (m.id, m.message_id, m.payload, m.priority) == (r.id, r.message_id, b"hello", 0)


async def test_payload_is_delivered_byte_for_byte(jobs: Broker) -> None:
    for payload in (b"", b"\0", bytes(range(256)) * 200):
        await jobs.enqueue("jobs", payload)
        m = await take(jobs)
        assert m.payload == payload
        assert type(m.payload) is bytes
        await m.ack()


async def test_key_and_headers_are_delivered(jobs: Broker) -> None:
    await jobs.enqueue("jobs", b"x", key="kunde-ß", headers=MappingProxyType({"traceparent": "00-ab", "emoji": "☃"}))
    m = await take(jobs)
    assert (m.key, m.headers) == ("kunde-ß", {"traceparent": "00-ab", "emoji": "☃"})


async def test_message_without_key_and_headers_has_none(jobs: Broker) -> None:
    await jobs.enqueue("jobs", b"x", headers={})
    m = await take(jobs)
    assert (m.key, m.headers) == (None, {})


async def test_neighbours_keep_their_own_keys_and_headers(jobs: Broker) -> None:
    out = heapline.Outgoing
    await jobs.enqueue_batch("jobs", [out(b"0"), out(b"1", key="k1"), out(b"2", headers={"h": "2"}), out(b"3")])
    found = [(m.payload, m.key, m.headers) for m in await jobs.pop("jobs", 10)]
    assert found == [(b"0", None, {}), (b"1", "k1", {}), (b"2", None, {"h": "2"}), (b"3", None, {})]


async def test_largest_allowed_message_is_delivered(world: World, topic: MakeTopic) -> None:
    config = (await topic("jobs", max_payload_bytes=world.small.get("segment_bytes", 1 << 20) // 2)).config
    payload = bytes(range(256)) * (config.max_payload_bytes // 256)
    key, headers = "k" * 4096, {"h": "v" * 32_000}
    for options in ({}, {"idempotency_key": "i" * 4096}, {"producer": heapline.Producer("p" * 128)}):
        await world.broker.enqueue("jobs", payload, key=key, headers=headers, **options)
    hl = await world.reopen("journal")
    messages = await hl.pop("jobs", 3, max_bytes=1 << 30)
    assert [(m.payload == payload, m.key, m.headers) for m in messages] == [(True, key, headers)] * 3


async def test_enqueued_at_is_the_time_of_the_enqueue(world: World, jobs: Broker) -> None:
    before = world.now()
    await jobs.enqueue("jobs", b"x")
    await world.advance(2)
    assert abs((await take(jobs)).enqueued_at - before) < timedelta(seconds=1)


async def test_priority_may_be_any_kind_of_int(jobs: Broker) -> None:
    class Urgency(IntEnum):
        HIGH = 1
        LOW = 9

    await jobs.enqueue("jobs", b"low", priority=Urgency.LOW)
    await jobs.enqueue("jobs", b"high", priority=Urgency.HIGH)
    m = await take(jobs)
    assert (m.payload, m.priority) == (b"high", 1)


async def test_delay_of_zero_is_ready_immediately(jobs: Broker) -> None:
    r = await jobs.enqueue("jobs", b"x", delay=0)
    assert (await jobs.get("jobs", r.id)).state == "ready"


async def test_deliver_at_in_the_past_is_ready_immediately(world: World, jobs: Broker) -> None:
    r = await jobs.enqueue("jobs", b"x", deliver_at=world.now() - timedelta(days=1))
    assert (await jobs.get("jobs", r.id)).state == "ready"


async def test_deliver_at_may_be_of_any_time_zone(world: World, jobs: Broker) -> None:
    moment = (world.now() + timedelta(hours=1)).astimezone(timezone(timedelta(hours=5, minutes=30)))
    r = await jobs.enqueue("jobs", b"x", deliver_at=moment)
    assert (await jobs.get("jobs", r.id)).due_at == moment


NAIVE = datetime(2030, 1, 1)
REFUSED: dict[str, dict[str, Any]] = {
    "payload of str": {"payload": "text"},
    "payload of bytearray": {"payload": bytearray(b"x")},
    "payload of None": {"payload": None},
    "priority over int64": {"priority": INT64_MAX + 1},
    "priority under int64": {"priority": INT64_MIN - 1},
    "priority of float": {"priority": 1.0},
    "priority of bool": {"priority": True},
    "priority of str": {"priority": "1"},
    "key of int": {"key": 7},
    "key empty": {"key": ""},
    "key too long": {"key": "k" * 5000},
    "key not UTF-8": {"key": "\ud800"},
    "delay negative": {"delay": -1},
    "delay not a number": {"delay": float("nan")},
    "delay endless": {"delay": float("inf")},
    "delay of str": {"delay": "1"},
    "delay of bool": {"delay": True},
    "deliver_at naive": {"deliver_at": NAIVE},
    "deliver_at of number": {"deliver_at": 1893456000},
    "delay and deliver_at": {"delay": 1, "deliver_at": datetime(2030, 1, 1, tzinfo=UTC)},
    "header value of int": {"headers": {"n": 1}},
    "header value of None": {"headers": {"n": None}},
    "header name of int": {"headers": {1: "n"}},
    "headers of list": {"headers": [("a", "b")]},
    "headers not UTF-8": {"headers": {"a": "\ud800"}},
    "headers too long": {"headers": {"a": "x" * 40_000}},
    "ttl of zero": {"ttl": 0},
    "ttl negative": {"ttl": -5},
    "ttl of str": {"ttl": "3600"},
    "max_retries negative": {"max_retries": -1},
    "max_retries too many": {"max_retries": 251},
    "max_retries of float": {"max_retries": 1.5},
    "idempotency_key empty": {"idempotency_key": ""},
    "idempotency_key of bytes": {"idempotency_key": b"k"},
    "idempotency_scope unknown": {"idempotency_key": "k", "idempotency_scope": "for ever"},
    "idempotency_scope without key": {"idempotency_scope": "pending"},
    "seq without producer": {"seq": 1},
    "epoch without producer": {"epoch": 1},
    "answered_below without producer": {"answered_below": 1},
    "producer_id without seq": {"producer_id": "p", "epoch": 1},
    "producer_id without epoch": {"producer_id": "p", "seq": 1},
    "epoch of zero": {"producer_id": "p", "epoch": 0, "seq": 1},
    "seq negative": {"producer_id": "p", "epoch": 1, "seq": -1},
    "answered_below negative": {"producer_id": "p", "epoch": 1, "seq": 1, "answered_below": -1},
}


@pytest.mark.parametrize("case", sorted(REFUSED))
async def test_bad_message_is_refused_and_nothing_changes(jobs: Broker, case: str) -> None:
    await put(jobs, 5)
    before = await picture(jobs)
    with pytest.raises(heapline.BadRequest) as caught:
        await jobs.enqueue("jobs", **{"payload": b"x", **REFUSED[case]})
    assert len(str(caught.value)) > 15
    assert await picture(jobs) == before


@pytest.mark.parametrize("case", ["payload of str", "deliver_at naive", "header value of int", "priority over int64"])
async def test_bad_message_refuses_its_whole_atomic_batch(jobs: Broker, case: str) -> None:
    before = await picture(jobs)
    bad = heapline.Outgoing(**{"payload": b"x", **REFUSED[case]})
    with pytest.raises(heapline.BadRequest):
        await jobs.enqueue_batch("jobs", [heapline.Outgoing(b"good"), bad])
    assert await picture(jobs) == before


async def test_naive_datetime_error_says_how_to_fix_it(jobs: Broker) -> None:
    with pytest.raises(heapline.BadRequest, match="time zone"):
        await jobs.enqueue("jobs", b"x", deliver_at=NAIVE)


async def test_bad_producer_name_is_refused(jobs: Broker) -> None:
    with pytest.raises(heapline.BadName):
        await jobs.enqueue("jobs", b"x", producer_id="no spaces", epoch=1, seq=1)
    with pytest.raises(heapline.BadName):
        await jobs.open_producer("jobs", "")


async def test_payload_of_the_limit_is_taken_and_one_byte_more_is_refused(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_payload_bytes=1000)
    await broker.enqueue("jobs", b"x" * 1000)
    before = await picture(broker)
    with pytest.raises(heapline.PayloadTooLarge, match="1000") as caught:
        await broker.enqueue("jobs", b"x" * 1001)
    assert (caught.value.size, caught.value.limit) == (1001, 1000)
    with pytest.raises(heapline.PayloadTooLarge):
        await broker.enqueue_batch("jobs", [heapline.Outgoing(b"x"), heapline.Outgoing(b"x" * 1001)])
    assert await picture(broker) == before
