"""A producer's identity: its epochs, its numbers, answered numbers, and forks."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

import heapline


class Epochs:
    """The part of a broker that a producer uses."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def open_producer(self, topic: str, producer_id: str) -> int:
        self.opened.append((topic, producer_id))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return len(self.opened)


@pytest.mark.parametrize("name", ["", "a b", "a/b", ".x", "x" * 129, None, 5])
def test_bad_name_is_refused(name: Any) -> None:
    with pytest.raises(heapline.BadName, match="producer"):
        heapline.Producer(name)


async def test_epoch_is_opened_once_for_each_topic_and_broker() -> None:
    producer = heapline.Producer("p")
    one, two = Epochs(), Epochs()
    lines = [await producer.line(b, t) for b in (one, two) for t in ("a", "b", "a")]  # type: ignore[arg-type]
    assert one.opened == two.opened == [("a", "p"), ("b", "p")]
    assert lines[0] is lines[2]
    assert lines[0] is not lines[3]


async def test_concurrent_first_uses_share_one_opening() -> None:
    producer, broker = heapline.Producer("p"), Epochs()
    broker.gate.clear()
    uses = [asyncio.create_task(producer.line(broker, "a")) for _ in range(5)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    uses[0].cancel()
    await asyncio.sleep(0)
    broker.gate.set()
    lines = await asyncio.gather(*uses, return_exceptions=True)
    assert isinstance(lines[0], asyncio.CancelledError)
    assert len({id(line) for line in lines[1:]}) == 1
    assert broker.opened == [("a", "p")]


async def test_opening_that_failed_is_tried_again() -> None:
    producer, broker = heapline.Producer("p"), Epochs()
    broker.error = heapline.TopicNotFound("a")
    with pytest.raises(heapline.TopicNotFound):
        await producer.line(broker, "a")  # type: ignore[arg-type]
    broker.error = None
    assert (await producer.line(broker, "a")).epoch == 2  # type: ignore[arg-type]


async def test_sequences_rise_and_answered_below_is_the_first_unanswered() -> None:
    producer = heapline.Producer("p")
    line = await producer.line(Epochs(), "a")  # type: ignore[arg-type]
    assert [line.take(3), line.take(1), line.take(2)] == [(0, 0), (3, 0), (4, 0)]
    line.answered(3)
    assert line.take(1) == (6, 0)
    line.answered(0)
    assert line.take(1) == (7, 4)
    for first in (4, 6, 7):
        line.answered(first)
    assert line.take(1) == (8, 8)


async def test_forked_child_gets_its_own_name_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    producer, broker = heapline.Producer("p"), Epochs()
    line = await producer.line(broker, "a")  # type: ignore[arg-type]
    line.take(10)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert producer.producer_id == f"p.fork{parent + 1}"
    child_line = await producer.line(broker, "a")  # type: ignore[arg-type]
    assert (child_line.next_seq, broker.opened[-1]) == (0, ("a", f"p.fork{parent + 1}"))
    monkeypatch.setattr(os, "getpid", lambda: parent + 2)
    assert producer.producer_id != f"p.fork{parent + 1}", "and a grandchild has another one"


def test_name_of_a_child_is_valid_however_long_the_parent_s(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = heapline.Producer("x" * 128)
    for pid in range(4_000_000, 4_000_020):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        heapline.Producer(producer.producer_id)
