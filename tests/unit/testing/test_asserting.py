"""`assert_enqueued` finds what fits, and says what there is when nothing does."""

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
def test_finds_what_fits(hl: SyncMemoryBroker, wanted: dict[str, object], count: int) -> None:
    assert len(assert_enqueued(hl, "mail", **wanted)) == count  # type: ignore[arg-type]


def test_failure_shows_what_is_there_instead(hl: SyncMemoryBroker) -> None:
    with pytest.raises(AssertionError) as failure:
        assert_enqueued(hl, "mail", {"to": "bob"}, priority=5)
    assert str(failure.value).splitlines() == [
        "no message with payload={'to': 'bob'}, priority=5 was enqueued in 'mail'; what waits there (3):",
        """  ready: payload=b'{"to": "ada"}', priority=5, key='k', headers={'a': '1', 'b': '2'}""",
        "  delayed: payload=b'plain', priority=0, due 2026-01-01 00:01:00",
        "  ready: payload=b'plain', priority=0",
    ]


def test_wrong_count_says_both_numbers(hl: SyncMemoryBroker) -> None:
    with pytest.raises(AssertionError, match=re.escape("1 wanted, but 2 found: messages with payload=b'plain'")):
        assert_enqueued(hl, "mail", b"plain", count=1)


def test_long_lists_and_payloads_are_cut(hl: SyncMemoryBroker) -> None:
    hl.enqueue_batch("mail", [heapline.Outgoing(b"x" * 1000) for _ in range(30)])
    with pytest.raises(AssertionError) as failure:
        assert_enqueued(hl, "mail", b"y")
    assert str(failure.value).endswith("and 13 more")
    assert max(map(len, str(failure.value).splitlines())) < 300


def test_missing_topic_is_named_with_those_that_there_are(hl: SyncMemoryBroker) -> None:
    with pytest.raises(AssertionError, match="topic 'post' does not exist; the topics are: mail"):
        assert_enqueued(hl, "post", count=0)
    hl.create_topic("eu/mail")
    hl.enqueue("eu/mail", b"x")
    assert_enqueued(hl, "eu/mail", b"x")
    assert_enqueued(hl, "default/mail", b"plain", count=2)


def test_what_was_done_is_not_enqueued_any_more(hl: SyncMemoryBroker) -> None:
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
