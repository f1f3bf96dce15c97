"""Lists are pages with a cursor, bounded in bytes; following the cursors shows every item once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from heapline.contract import batches, call, groups, replays, schedules, topics
from heapline.contract.broker import Broker
from heapline.contract.call import Command
from tests.conformance.conftest import MakeTopic
from tests.conformance.test_prepared_batches import some

Fill = Callable[[Broker, str], Awaitable[Any]]


async def make_sink(broker: Broker, name: str) -> None:
    await broker.prepare_batch(name, "1", some(name), topic="jobs")
    await broker.commit_batch(name, ["1"], sink=name, version=0)


LISTS: list[Any] = [
    pytest.param(
        schedules.ListSchedules(),
        lambda broker, name: broker.create_schedule(name, topic="jobs", every=60.0),
        marks=pytest.mark.feature("schedules"),
    ),
    pytest.param(
        groups.ListGroups("jobs"),
        lambda broker, name: broker.create_group("jobs", name),
        marks=pytest.mark.feature("groups"),
    ),
    pytest.param(
        replays.ListReplays(),
        lambda broker, name: broker.start_replay(name, "jobs"),
        marks=pytest.mark.feature("replay"),
    ),
    pytest.param(
        batches.ListBatches(),
        lambda broker, name: broker.prepare_batch(name, "1", some(name), topic="jobs"),
        marks=pytest.mark.feature("batches"),
    ),
    pytest.param(batches.ListSinks(), make_sink, marks=pytest.mark.feature("batches")),
    pytest.param(topics.ListTopics(), lambda broker, name: None),
    pytest.param(topics.ListStats(), lambda broker, name: None),
]


def name_of(item: Any) -> str:
    return next(getattr(item, field) for field in ("name", "batch_id", "topic") if hasattr(item, field))


@pytest.mark.parametrize(("ask", "fill"), LISTS, ids=lambda value: getattr(type(value), "__name__", None))
async def test_page_ends_at_its_bytes_and_the_cursor_continues(
    topic: MakeTopic, broker: Broker, ask: Command[Any], fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b", "jobs"]
    for name in names:
        await topic(name)
    for name in names:
        if (made := fill(broker, name)) is not None:
            await made
    monkeypatch.setattr(call, "PAGE_BYTES", 1)
    pages = [await broker.do(ask)]
    while pages[-1].cursor is not None:
        pages.append(await broker.do(type(ask)(**{**_fields(ask), "cursor": pages[-1].cursor})))
    assert [len(page.items) for page in pages] == [1, 1, 1]
    assert [name_of(page.items[0]) for page in pages] == names


def _fields(ask: Any) -> dict[str, Any]:
    return {name: getattr(ask, name) for name in ask.__struct_fields__}


async def test_statistics_of_all_topics_are_those_of_each(topic: MakeTopic, broker: Broker) -> None:
    for name in ("mail", "jobs"):
        await topic(name)
    await broker.enqueue("mail", b"x")
    found = await broker.list_stats()
    assert [(stats.topic, stats.ready) for stats in found] == [("jobs", 0), ("mail", 1)]
