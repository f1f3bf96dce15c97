"""`assert_enqueued` finds matching messages, and lists the waiting ones when none matches."""

from __future__ import annotations

import asyncio
import doctest
import re
from collections.abc import Iterator

import pytest

import heapline
from heapline.testing import HandClock, SyncMemoryBroker, assert_enqueued, assertions, drainer, memory_broker_sync


@pytest.fixture
def hl() -> Iterator[SyncMemoryBroker]:
    with memory_broker_sync(HandClock(1_767_225_600_000)) as broker:
        broker.create_topic("mail")
        broker.enqueue("mail", b'{"to": "ada"}', priority=5, key="k", headers={"a": "1", "b": "2"})
        broker.enqueue("mail", b"plain", delay=60)
        broker.enqueue("mail", b"plain")
        yield broker


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ({}, 3),
        ({"payload": b"plain"}, 2),
        ({"payload": {"to": "ada"}}, 1),
        ({"payload": {"to": "bob"}, "count": 0}, 0),
        ({"payload": b'{"to":"ada"}', "count": 0}, 0),
        ({"priority": 5}, 1),
        ({"priority": 0, "count": 2}, 2),
        ({"key": "k"}, 1),
        ({"key": None}, 2),
        ({"headers": {"b": "2"}}, 1),
        ({"headers": {"b": "1"}, "count": 0}, 0),
        ({"match": lambda info: info.state == "delayed"}, 1),
    ],
)
def test_assert_enqueued_finds_matching_messages(hl: SyncMemoryBroker, wanted: dict[str, object], count: int) -> None:
    assert len(assert_enqueued(hl, "mail", **wanted)) == count  # type: ignore[arg-type]


def test_failure_lists_the_waiting_messages(hl: SyncMemoryBroker) -> None:
    with pytest.raises(AssertionError) as failure:
        assert_enqueued(hl, "mail", {"to": "bob"}, priority=5)
    assert str(failure.value).splitlines() == [
        "no message with payload={'to': 'bob'}, priority=5 was enqueued in 'mail'; 3 waiting:",
        """  ready: payload=b'{"to": "ada"}', priority=5, key='k', headers={'a': '1', 'b': '2'}""",
        "  delayed: payload=b'plain', priority=0, due 2026-01-01 00:01:00",
        "  ready: payload=b'plain', priority=0",
    ]


def test_wrong_count_says_both_numbers(hl: SyncMemoryBroker) -> None:
    with pytest.raises(AssertionError, match=re.escape("expected 1 messages with payload=b'plain' in 'mail', found 2")):
        assert_enqueued(hl, "mail", b"plain", count=1)


def test_long_lists_and_payloads_are_cut(hl: SyncMemoryBroker) -> None:
    hl.enqueue_batch("mail", [heapline.Outgoing(b"x" * 1000) for _ in range(30)])
    with pytest.raises(AssertionError) as failure:
        assert_enqueued(hl, "mail", b"y")
    assert str(failure.value).endswith("and 13 more")
    assert max(map(len, str(failure.value).splitlines())) < 300


def test_missing_topic_error_lists_existing_topics(hl: SyncMemoryBroker) -> None:
    with pytest.raises(AssertionError, match="topic 'post' does not exist; existing topics: mail"):
        assert_enqueued(hl, "post", count=0)
    hl.create_topic("eu/mail")
    hl.enqueue("eu/mail", b"x")
    assert_enqueued(hl, "eu/mail", b"x")
    assert_enqueued(hl, "default/mail", b"plain", count=2)


def test_settled_message_does_not_match(hl: SyncMemoryBroker) -> None:
    [m] = hl.pop("mail")
    assert_enqueued(hl, "mail", count=2)
    m.ack()
    assert_enqueued(hl, "mail", count=2)


@pytest.mark.parametrize("module", [assertions, drainer])
def test_examples_run(module: object) -> None:
    from heapline.testing import memory_broker

    names = {"asyncio": asyncio, "memory_broker": memory_broker, "memory_broker_sync": memory_broker_sync}
    result = doctest.testmod(module, extraglobs=names)  # type: ignore[arg-type]
    assert result.attempted
    assert not result.failed
