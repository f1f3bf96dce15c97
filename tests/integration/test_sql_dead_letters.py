"""Dead letters in Postgres, named by their ids: found without reading the others."""

from __future__ import annotations

from typing import Any

import pytest

import heapline
from heapline import Outgoing
from heapline.contract.dead_letters import GetDeadLetter
from tests.integration.sql_rig import fresh_topic, node

asyncpg = pytest.importorskip("asyncpg")
from heapline.sql import dead_letters  # noqa: E402 - needs asyncpg

LETTERS = 300


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of dead letters each query returned."""
    counts: list[int] = []
    fetch = asyncpg.Connection.fetch

    async def counted(self: Any, query: str, *values: Any, **options: Any) -> Any:
        rows = await fetch(self, query, *values, **options)
        if "FROM dead" in query:
            counts.append(len(rows))
        return rows

    monkeypatch.setattr(asyncpg.Connection, "fetch", counted)
    return counts


async def bury(hl: Any, topic: str, count: int) -> list[int]:
    """Make dead letters, and return their ids with the oldest first."""
    await hl.create_topic(topic)
    await hl.enqueue_batch(topic, [Outgoing(b"%d" % n) for n in range(count)])
    ids = []
    for _ in range(0, count, 100):
        messages = await hl.pop(topic, 100)
        await hl.bury(messages, reason="broken")
        ids += sorted(m.id for m in messages)
    return ids


async def test_letters_named_by_their_ids_are_found_without_reading_others(
    rows_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "SLICE", 10)
    async with node() as hl:
        topic, other = fresh_topic(), fresh_topic()
        ids, (foreign,) = await bury(hl, topic, LETTERS), await bury(hl, other, 1)
        del rows_read[:]
        assert await hl.dlq_replay(topic, ids=[ids[-1], ids[-1], foreign, 1]) == 1
        assert await hl.dlq_delete(topic, ids=[*ids[-26:], foreign]) == 25
        assert sum(rows_read) == 26
        assert await hl.dlq_delete(topic, ids=[]) == 0
        assert await hl.dlq_replay(topic, ids=ids[:2], where=heapline.DlqFilter(reason="other")) == 0
        assert (await hl.stats(topic)).dead == LETTERS - 26
        assert (await hl.stats(other)).dead == 1
        assert [m.id for m in await hl.pop(topic, 10)] == [ids[-1]]


async def test_letters_named_in_any_order_are_replayed_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "SLICE", 10)
    async with node() as hl:
        topic = fresh_topic()
        ids = await bury(hl, topic, 35)
        assert await hl.dlq_replay(topic, ids=ids[::-1], rate=0.01) == 35
        infos = [await hl.get(topic, id) for id in ids]
        dues = [info.due_at for info in infos[1:]]
        assert infos[0].state == "ready"
        assert dues == sorted(dues)


async def test_letter_is_looked_up_by_its_id_alone(rows_read: list[int]) -> None:
    async with node() as hl:
        topic, other = fresh_topic(), fresh_topic()
        ids, (foreign,) = await bury(hl, topic, 100), await bury(hl, other, 1)
        del rows_read[:]
        letter = await hl.do(GetDeadLetter(topic, ids[50]))
        assert (letter.id, letter.reason) == (ids[50], "broken")
        assert rows_read == []
        waiting = await hl.enqueue(topic, b"not dead")
        for id in (foreign, 1, waiting.id):
            with pytest.raises(heapline.MessageNotFound):
                await hl.do(GetDeadLetter(topic, id))
