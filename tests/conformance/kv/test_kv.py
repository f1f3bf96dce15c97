"""The `KV` protocol of assign/kv.py, on every store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from heapline.assign.kv import KV, Conflict, Entry

Ended = Callable[[str], Awaitable[None]]


async def test_created_key_is_read_with_its_revision(kv: KV) -> None:
    revision = await kv.create("worker.w-1", b"one")
    assert await kv.get("worker.w-1") == Entry("worker.w-1", b"one", revision)


async def test_missing_key_is_none(kv: KV) -> None:
    assert await kv.get("leader") is None
    assert await kv.entries("worker.") == []


async def test_empty_value_is_a_value(kv: KV) -> None:
    revision = await kv.create("leader", b"")
    assert await kv.get("leader") == Entry("leader", b"", revision)
    assert await kv.entries("leader") == [Entry("leader", b"", revision)]


async def test_create_conflicts_with_an_existing_key_and_changes_nothing(kv: KV) -> None:
    revision = await kv.create("leader", b"ada")
    with pytest.raises(Conflict):
        await kv.create("leader", b"bob")
    assert await kv.get("leader") == Entry("leader", b"ada", revision)


async def test_revisions_rise_across_all_keys(kv: KV) -> None:
    first = await kv.create("a", b"1")
    second = await kv.create("b", b"2")
    third = await kv.update("a", b"3", first)
    assert first < second < third


async def test_update_requires_exactly_the_newest_revision(kv: KV) -> None:
    first = await kv.create("leader", b"1")
    second = await kv.update("leader", b"2", first)
    for wrong in (first, second + 1, 0, -1):
        with pytest.raises(Conflict):
            await kv.update("leader", b"3", wrong)
    assert await kv.get("leader") == Entry("leader", b"2", second)


async def test_update_of_a_missing_key_conflicts(kv: KV) -> None:
    for revision in (0, 1, 7):
        with pytest.raises(Conflict):
            await kv.update("leader", b"1", revision)
    assert await kv.get("leader") is None


async def test_writes_to_another_key_do_not_conflict(kv: KV) -> None:
    first = await kv.create("worker.w-1", b"1")
    await kv.create("worker.w-2", b"1")
    await kv.update("worker.w-1", b"2", first)


async def test_one_of_many_writers_at_one_revision_wins(kv: KV) -> None:
    revision = await kv.create("leader", b"")

    async def write(name: int) -> int | None:
        with contextlib.suppress(Conflict):
            return await kv.update("leader", b"%d" % name, revision)
        return None

    won = {name: at for name, at in enumerate(await asyncio.gather(*map(write, range(20)))) if at is not None}
    assert len(won) == 1
    [(name, at)] = won.items()
    assert await kv.get("leader") == Entry("leader", b"%d" % name, at)


async def test_one_of_many_creators_wins(kv: KV) -> None:
    async def create(name: int) -> bool:
        with contextlib.suppress(Conflict):
            await kv.create("leader", b"%d" % name)
            return True
        return False

    assert sum(await asyncio.gather(*map(create, range(20)))) == 1


async def test_deleted_key_is_missing_and_can_be_created_again(kv: KV) -> None:
    first = await kv.create("leader", b"ada")
    await kv.delete("leader", first)
    assert await kv.get("leader") is None
    assert await kv.entries("") == []
    with pytest.raises(Conflict):
        await kv.update("leader", b"ada", first)
    assert await kv.create("leader", b"bob") > first


async def test_delete_requires_exactly_the_newest_revision(kv: KV) -> None:
    first = await kv.create("leader", b"ada")
    second = await kv.update("leader", b"ada", first)
    for wrong in (first, 0):
        with pytest.raises(Conflict):
            await kv.delete("leader", wrong)
    assert await kv.get("leader") == Entry("leader", b"ada", second)
    with pytest.raises(Conflict):
        await kv.delete("other", 1)


async def test_large_value_is_read_fresh(kv: KV, ended: Ended) -> None:
    first = await kv.create("assignment", bytes(10_000))
    for _ in range(2):
        assert await kv.get("assignment") == Entry("assignment", bytes(10_000), first)
    second = await kv.update("assignment", b"x" * 10_000, first)
    for _ in range(2):
        assert await kv.get("assignment") == Entry("assignment", b"x" * 10_000, second)
    third = await kv.update("assignment", b"small", second, ttl=1)
    assert await kv.get("assignment") == Entry("assignment", b"small", third)
    fourth = await kv.update("assignment", bytes(10_000), third, ttl=1)
    assert await kv.get("assignment") == Entry("assignment", bytes(10_000), fourth)
    await ended("assignment")
    fifth = await kv.create("assignment", bytes(20_000))
    assert await kv.get("assignment") == Entry("assignment", bytes(20_000), fifth)
    await kv.delete("assignment", fifth)
    assert await kv.get("assignment") is None


async def test_expired_key_is_missing_conflicts_and_can_be_created(kv: KV, ended: Ended) -> None:
    first = await kv.create("worker.w-1", b"1", ttl=1)
    await ended("worker.w-1")
    assert await kv.entries("worker.") == []
    with pytest.raises(Conflict):
        await kv.update("worker.w-1", b"2", first)
    second = await kv.create("worker.w-1", b"3", ttl=30)
    assert second > first
    assert await kv.get("worker.w-1") == Entry("worker.w-1", b"3", second)
    with pytest.raises(Conflict):
        await kv.create("worker.w-1", b"4")


async def test_update_sets_its_own_ttl_or_none(kv: KV, ended: Ended) -> None:
    stays = await kv.update("stays", b"2", await kv.create("stays", b"1", ttl=1))
    await kv.update("goes", b"2", await kv.create("goes", b"1"), ttl=1)
    await ended("goes")
    assert await kv.get("stays") == Entry("stays", b"2", stays)


async def test_listing_shows_the_newest_entry_of_each_key_under_a_prefix(kv: KV) -> None:
    expected = []
    for n in range(7):
        revision = await kv.create(f"worker.w-{n}", b"old")
        expected.append(Entry(f"worker.w-{n}", b"new", await kv.update(f"worker.w-{n}", b"new", revision)))
    leader = Entry("leader", b"1", await kv.create("leader", b"1"))
    await kv.create("worker", b"no child of worker.")
    assert await kv.entries("worker.") == expected
    assert await kv.entries("leader") == [leader]
    assert len(await kv.entries("")) == 9


async def test_listing_is_complete_with_many_keys(kv: KV) -> None:
    names = [f"worker.w-{n:04}" for n in range(1200)]
    for start in range(0, len(names), 100):
        await asyncio.gather(*(kv.create(name, b"x") for name in names[start : start + 100]))
    assert [entry.key for entry in await kv.entries("worker.")] == names


async def heard(events: AsyncIterator[Entry | None], count: int) -> list[Entry | None]:
    async with asyncio.timeout(30):
        return [await anext(events) for _ in range(count)]


async def test_watch_yields_writes_under_its_prefix(kv: KV) -> None:
    async with contextlib.aclosing(kv.watch("worker.")) as events:
        waiting = asyncio.create_task(heard(events, 3))
        await listening(kv)
        await kv.create("leader", b"another prefix")
        first = await kv.create("worker.w-1", b"1")
        second = await kv.update("worker.w-1", b"2", first)
        await kv.delete("worker.w-1", second)
        assert await waiting == [Entry("worker.w-1", b"1", first), Entry("worker.w-1", b"2", second), None]


async def test_two_watchers_receive_the_same_events(kv: KV) -> None:
    async with contextlib.aclosing(kv.watch("leader")) as one, contextlib.aclosing(kv.watch("")) as all:
        waiting = [asyncio.create_task(heard(events, 1)) for events in (one, all)]
        await listening(kv)
        revision = await kv.create("leader", b"ada")
        assert await asyncio.gather(*waiting) == [[Entry("leader", b"ada", revision)]] * 2


async def listening(kv: KV) -> None:
    """Wait until the tasks just created have reached the server: later requests are answered later."""
    for _ in range(10):
        await asyncio.sleep(0)
    for _ in range(3):
        await kv.get("none")
