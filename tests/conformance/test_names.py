"""The names and keywords of the contract, as specified."""

from __future__ import annotations

import inspect

import pytest

import heapline
from heapline.contract.broker import Broker

#: Every call of the contract with its public parameters.
CALLS = {
    "do": [],
    "stream": [],
    "describe": [],
    "read_audit": ["limit", "cursor"],
    "get_topic": ["topic"],
    "create_topic": ["topic"],
    "update_topic": ["topic"],
    "list_topics": [],
    "delete_topic": ["topic"],
    "stats": ["topic"],
    "list_stats": [],
    "purge": ["topic", "enqueued_before"],
    "purge_count": ["topic"],
    "pause_topic": ["topic", "until"],
    "resume_topic": ["topic"],
    "snapshot": ["topic"],
    "record_audit": ["topic", "until", "messages", "lost", "doubled", "early", "refuted", "topics"],
    "enqueue": [
        "topic", "payload", "priority", "key", "delay", "headers", "ttl", "max_retries", "idempotency_key",
        "deliver_at", "idempotency_scope", "producer", "producer_id", "epoch", "seq", "answered_below",
    ],
    "enqueue_batch": ["topic", "messages", "atomic", "producer", "producer_id", "epoch", "answered_below"],
    "open_producer": ["topic", "producer_id"],
    "prepare_batch": ["batch_id", "part", "messages", "topic", "producer_id", "epoch", "answered_below"],
    "commit_batch": ["batch_id", "parts", "sink", "version"],
    "abort_batch": ["batch_id"],
    "list_batches": [],
    "list_sinks": [],
    "forget_sink": ["name"],
    "pop": ["topic", "max_messages", "visibility", "wait", "holder", "max_bytes", "request_id"],
    "set_partition_throttled": ["topic", "partition", "throttled", "reason"],
    "ack": ["messages"],
    "nack": ["messages", "backoff", "reason"],
    "release": ["messages"],
    "extend": ["messages", "seconds"],
    "bury": ["messages", "reason"],
    "get": ["topic", "message_id"],
    "peek": ["topic", "limit"],
    "cancel": ["topic", "message_id"],
    "reschedule": ["topic", "message_id", "delay", "deliver_at", "priority"],
    "dlq_list": ["topic", "limit", "where"],
    "dlq_replay": ["topic", "ids", "where", "rate"],
    "dlq_delete": ["topic", "ids", "where"],
    "offsets": ["topic"],
    "read_log": ["topic", "partition", "start", "end"],
    "close": [],
    "leases_returned": [],
    "create_group": ["topic", "group", "start"],
    "get_group": ["topic", "group"],
    "list_groups": ["topic"],
    "delete_group": ["topic", "group"],
    "group_offsets": ["topic", "group"],
    "reset_offsets": ["topic", "group", "to", "partitions"],
    "subscribe": ["topic", "group", "member", "credits", "batches", "start", "on_assigned", "on_revoked"],
    "group_fetch": [
        "topic", "group", "member", "session", "max_messages", "max_bytes", "wait", "start", "config",
    ],
    "group_ack": ["topic", "group", "member", "offsets", "session"],
    "group_nack": ["topic", "group", "member", "offsets", "session", "reason"],
    "group_leave": ["topic", "group", "member", "session"],
    "group_dead_list": ["topic", "group", "limit"],
    "group_dead_replay": ["topic", "group", "offsets"],
    "group_dead_delete": ["topic", "group", "offsets"],
    "replay": [
        "topic", "start", "end", "partitions", "mode", "where", "rate", "checkpoint", "batches", "allow_gaps",
    ],
    "start_replay": [
        "name", "topic", "into", "start", "end", "partitions", "mode", "where", "rate", "priority", "delay",
        "deliver_at", "keep_due", "allow_gaps",
    ],
    "get_replay": ["name"],
    "list_replays": [],
    "cancel_replay": ["name"],
    "create_schedule": ["name", "topic", "payload", "cron", "every", "tz"],
    "get_schedule": ["name"],
    "list_schedules": [],
    "pause_schedule": ["name"],
    "resume_schedule": ["name"],
    "delete_schedule": ["name"],
    "dlq_groups": ["topic", "limit"],
    "dlq_count": ["topic", "where"],
    "due_times": ["topic"],
    "explain": ["topic", "limit", "message_id"],
    "list_leases": ["topic", "limit", "holder"],
    "end_leases": ["topic", "ids", "granted_until", "reason"],
    "list_workers": [],
    "stats_series": ["topic", "since"],
    "message_history": ["topic", "message_id", "limit", "cursor"],
    "search_messages": ["topic", "text", "key", "header", "state", "limit", "cursor"],
    "split_messages": ["topic", "dead", "rows", "parts"],
    "scan_messages": ["topic", "dead", "first_id", "end_id", "payloads", "limit", "max_bytes"],
}  # fmt: skip


def test_broker_is_a_broker(broker: Broker) -> None:
    assert isinstance(broker, heapline.Broker)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_broker_has_every_call_with_every_keyword(broker: Broker, name: str) -> None:
    parameters = inspect.signature(getattr(broker, name)).parameters
    assert set(CALLS[name]) <= set(parameters)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_contract_and_broker_agree_on_names_order_and_defaults(broker: Broker, name: str) -> None:
    promised = list(inspect.signature(getattr(Broker, name)).parameters.values())[1:]
    given = list(inspect.signature(getattr(broker, name)).parameters.values())
    assert [(p.name, p.kind, p.default) for p in given] == [(p.name, p.kind, p.default) for p in promised]


def test_contract_has_only_calls_that_this_suite_lists() -> None:
    public = {name for name in dir(Broker) if callable(getattr(Broker, name)) and not name.startswith("_")}
    assert public == set(CALLS)


async def test_message_has_every_attribute_of_the_contract(jobs: Broker) -> None:
    await jobs.enqueue("jobs", b"payload", priority=5, key="customer-7", headers={"k": "v"})
    (m,) = await jobs.pop("jobs", holder="worker-1")
    assert (m.payload, m.priority, m.attempts, m.key, m.headers, m.topic, m.partition) == (
        b"payload", 5, 1, "customer-7", {"k": "v"}, "jobs", 0,
    )  # fmt: skip
    assert isinstance(m.id, int)
    assert len(m.message_id) == 26
    assert m.enqueued_at.utcoffset() is not None
    assert m.deadline > m.enqueued_at
    for act in ("ack", "nack", "release", "extend", "bury"):
        assert callable(getattr(m, act))


async def test_example_of_the_contract_runs_as_written(jobs: Broker) -> None:
    hl = jobs
    r = await hl.enqueue(
        "jobs", b"payload", priority=5, key="customer-7", delay=None, headers={"k": "v"}, ttl=3600, max_retries=3,
        idempotency_key="order-1",
    )  # fmt: skip
    assert isinstance(r.message_id, str)
    assert isinstance(r.id, int)
    assert r.duplicate is False
    rs = await hl.enqueue_batch("jobs", [heapline.Outgoing(b"a", priority=1)], atomic=True)
    assert len(rs) == 1
    ms = await hl.pop("jobs", max_messages=100, visibility=30.0, wait=5.0, holder="worker-1", max_bytes=2 << 20)
    assert [m.payload for m in ms] == [b"a", b"payload"]
    await hl.ack(ms)
    assert (await hl.get("jobs", r.message_id)).state == "acked"
    assert await hl.peek("jobs", 10) == []
    assert await hl.dlq_list("jobs", limit=100) == []
    assert await hl.dlq_replay("jobs", ids=None, where=heapline.DlqFilter(reason="x"), rate=None) == 0
    assert await hl.dlq_delete("jobs", ids=[]) == 0
    assert await hl.purge("jobs") == 0
    await hl.pause_topic("jobs", until=None)
    await hl.resume_topic("jobs")
    assert (await hl.stats("jobs")).acked_total == 2
    await hl.update_topic("jobs", max_backlog=10)
    assert [t.name for t in await hl.list_topics()] == ["jobs"]
    await hl.delete_topic("jobs")
    assert await hl.list_topics() == []


@pytest.mark.feature("log")
async def test_log_example_of_the_contract_runs_as_written(jobs: Broker) -> None:
    hl = jobs
    await hl.enqueue("jobs", b"payload")
    await hl.snapshot("jobs")
    (start, end) = (await hl.offsets("jobs"))[0]
    frames = [frame async for frame in hl.read_log("jobs", partition=0, start=0, end=None)]
    assert (start, end) == (0, frames[-1].offset + frames[-1].row_count)
