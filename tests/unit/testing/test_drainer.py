"""`drain` handles due messages once, in order, and returns what was handled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import heapline
from heapline.testing import HandClock, MemoryBroker, SyncMemoryBroker, drain, drain_sync


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
async def hl(clock: HandClock) -> Any:
    async with MemoryBroker(clock) as broker:
        await broker.create_topic("jobs", max_retries_default=1)
        yield broker


async def test_drain_handles_best_first_including_enqueued_messages(hl: MemoryBroker) -> None:
    await hl.create_topic("more")

    async def handler(m: heapline.Message) -> str:
        if m.topic == "jobs":
            await hl.enqueue("more", m.payload * 2)
        return m.payload.decode()

    await hl.enqueue("jobs", b"late", priority=2)
    await hl.enqueue("jobs", b"soon", priority=1)
    done = await drain(hl, handler)
    assert [(d.topic, d.result, d.outcome) for d in done] == [
        ("jobs", "soon", "ack"), ("more", "soonsoon", "ack"), ("jobs", "late", "ack"), ("more", "latelate", "ack")
    ]  # fmt: skip
    assert hl.standing("jobs") == hl.standing("more") == []


async def test_only_named_topics(hl: MemoryBroker) -> None:
    await hl.create_topic("other")
    await hl.enqueue("other", b"x")
    assert await drain(hl, print, "jobs") == []
    assert len(hl.standing("other")) == 1


async def test_error_of_a_handler_is_raised_and_its_message_nacked(hl: MemoryBroker, clock: HandClock) -> None:
    await hl.enqueue("jobs", b"x")

    def fail(m: heapline.Message) -> None:
        raise ValueError("no good")

    with pytest.raises(ValueError, match="no good"):
        await drain(hl, fail)
    [info] = hl.standing("jobs")
    assert (info.state, info.attempts, info.reason) == ("delayed", 1, "ValueError: no good")
    assert await drain(hl, fail) == []  # backoff
    clock.advance(60)
    [done] = await drain(hl, fail, on_error="answer")
    assert isinstance(done.error, ValueError)
    assert hl.standing("jobs")[0].state == "dead"


async def test_message_settled_by_its_handler_is_not_settled_again(hl: MemoryBroker) -> None:
    await hl.enqueue("jobs", b"x")

    async def bury(m: heapline.Message) -> None:
        await m.bury(reason="mine")

    await drain(hl, bury)
    assert [(i.state, i.reason) for i in hl.standing("jobs")] == [("dead", "mine")]


async def test_handler_that_enqueues_its_own_work_is_stopped(hl: MemoryBroker) -> None:
    async def again(m: heapline.Message) -> None:
        await hl.enqueue("jobs", b"x")

    await hl.enqueue("jobs", b"x")
    with pytest.raises(AssertionError, match="7 messages were handled and more is due"):
        await drain(hl, again, limit=7)
    assert [i.state for i in hl.standing("jobs")] == ["ready"]


async def test_work_must_be_callable_or_an_app(hl: MemoryBroker) -> None:
    with pytest.raises(TypeError, match="a function of a message, or an app"):
        await drain(hl, 7)


def test_blocking_drain_calls_plain_and_async_handlers(clock: HandClock) -> None:
    with SyncMemoryBroker(clock) as hl:
        hl.create_topic("jobs")
        hl.create_topic("more")
        hl.enqueue("jobs", b"x")

        def plain(m: Any) -> None:
            if m.topic == "jobs":
                hl.enqueue("more", b"y")  # no loop runs here, so this may block

        assert [d.payload for d in drain_sync(hl, plain)] == [b"x", b"y"]

        async def coroutine(m: Any) -> str:
            return "awaited"

        hl.enqueue("jobs", b"z")
        assert [d.result for d in drain_sync(hl, coroutine)] == ["awaited"]
        hl.enqueue("jobs", b"z")
        with pytest.raises(ZeroDivisionError):
            drain_sync(hl, lambda m: 1 / 0)
        hl.enqueue_batch("jobs", [heapline.Outgoing(b"1"), heapline.Outgoing(b"2")])
        with pytest.raises(AssertionError, match="1 messages were handled"):
            drain_sync(hl, plain, limit=1)


class FakeApp:
    """The part of an app that drain uses; see client/tasks."""

    layers: tuple[Any, ...] = ()

    def topics(self) -> list[str]:
        return ["jobs", "never-made"]

    def find(self, message: Any) -> Any:
        if message.headers.get("task") != "double":
            return None
        codec = SimpleNamespace(decode=lambda payload: {"n": int(payload)}, call=lambda arguments: 2 * arguments["n"])
        outcome = SimpleNamespace(act="bury", reason="by the rules", backoff=None)
        return SimpleNamespace(codec=codec, rules=SimpleNamespace(decide=lambda *_: outcome))


async def test_app_runs_its_tasks_and_its_rules_decide_about_failures(hl: MemoryBroker) -> None:
    await hl.enqueue("jobs", b"21", headers={"task": "double"})
    assert [d.result for d in await drain(hl, FakeApp())] == [42]
    await hl.enqueue("jobs", b"no number", headers={"task": "double"})
    [done] = await drain(hl, FakeApp(), on_error="answer")
    assert done.outcome == "bury"
    assert hl.standing("jobs")[0].reason == "by the rules"
    await hl.enqueue("jobs", b"1", headers={"task": "unknown"})
    with pytest.raises(LookupError, match="no task of the app"):
        await drain(hl, FakeApp())
