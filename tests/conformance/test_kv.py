"""The contract of `heapline.assign.kv`, for every store: add yours to STORES.

A store's class makes it, and says how time passes there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

import pytest

from heapline.assign.kv import KV, Conflict, Entry
from heapline.assign.memory_kv import MemoryKV


class StoreUnderTest(Protocol):
    kv: KV
    other: KV  # another client of the same store

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def pass_time(self, seconds: float) -> None: ...


class InMemory:
    """Two clients within one process share one object."""

    def __init__(self) -> None:
        self.now = 0.0
        self.kv = self.other = MemoryKV(lambda: self.now)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds


STORES: dict[str, Any] = {"memory": InMemory}


@pytest.fixture(params=sorted(STORES))
async def store(request: pytest.FixtureRequest) -> AsyncIterator[StoreUnderTest]:
    made: StoreUnderTest = STORES[request.param]()
    await made.start()
    yield made
    await made.stop()


async def test_created_key_is_there_for_everybody(store: StoreUnderTest) -> None:
    revision = await store.kv.create("worker.w-1", b"\x00value")
    assert await store.other.get("worker.w-1") == Entry("worker.w-1", b"\x00value", revision)


async def test_key_that_is_not_there_is_none(store: StoreUnderTest) -> None:
    assert await store.kv.get("leader") is None


async def test_key_is_created_once(store: StoreUnderTest) -> None:
    await store.kv.create("leader", b"a")
    with pytest.raises(Conflict):
        await store.other.create("leader", b"b")
    entry = await store.kv.get("leader")
    assert entry is not None
    assert entry.value == b"a"


async def test_update_needs_the_present_revision(store: StoreUnderTest) -> None:
    first = await store.kv.create("leader", b"a")
    second = await store.other.update("leader", b"b", first)
    with pytest.raises(Conflict):
        await store.kv.update("leader", b"c", first)
    assert await store.kv.get("leader") == Entry("leader", b"b", second)


async def test_update_of_a_key_that_never_was_conflicts(store: StoreUnderTest) -> None:
    with pytest.raises(Conflict):
        await store.kv.update("leader", b"a", 1)


async def test_revisions_rise_over_all_keys(store: StoreUnderTest) -> None:
    revisions = [await store.kv.create(f"worker.{n}", b"") for n in range(5)]
    revisions.append(await store.kv.update("worker.0", b"x", revisions[0]))
    assert revisions == sorted(set(revisions))


async def test_delete_needs_the_present_revision(store: StoreUnderTest) -> None:
    first = await store.kv.create("leader", b"a")
    second = await store.kv.update("leader", b"b", first)
    with pytest.raises(Conflict):
        await store.kv.delete("leader", first)
    await store.kv.delete("leader", second)
    assert await store.kv.get("leader") is None


async def test_deleted_key_conflicts_with_its_old_revision_and_can_be_created(store: StoreUnderTest) -> None:
    first = await store.kv.create("leader", b"a")
    await store.kv.delete("leader", first)
    with pytest.raises(Conflict):
        await store.kv.update("leader", b"b", first)
    assert await store.other.create("leader", b"c") > first


async def test_key_goes_away_when_its_ttl_has_passed(store: StoreUnderTest) -> None:
    await store.kv.create("worker.a", b"a", ttl=2.0)
    await store.pass_time(1.0)
    assert await store.kv.get("worker.a") is not None
    await store.pass_time(2.5)
    assert await store.kv.get("worker.a") is None
    assert await store.kv.entries("worker.") == []


async def test_key_whose_ttl_has_passed_cannot_be_renewed_but_created_at_once(store: StoreUnderTest) -> None:
    first = await store.kv.create("worker.a", b"a", ttl=2.0)
    await store.pass_time(3.5)
    with pytest.raises(Conflict):
        await store.kv.update("worker.a", b"b", first, ttl=2.0)
    assert await store.other.create("worker.a", b"c", ttl=2.0) > first


async def test_update_brings_a_ttl_of_its_own(store: StoreUnderTest) -> None:
    revision = await store.kv.create("worker.a", b"a", ttl=2.0)
    for _ in range(3):
        await store.pass_time(1.2)
        revision = await store.kv.update("worker.a", b"a", revision, ttl=2.0)
    assert await store.kv.get("worker.a") is not None
    await store.pass_time(3.5)
    assert await store.kv.get("worker.a") is None


async def test_key_without_ttl_stays(store: StoreUnderTest) -> None:
    revision = await store.kv.create("leader", b"a", ttl=2.0)
    await store.kv.update("leader", b"b", revision)
    await store.pass_time(3.5)
    assert await store.kv.get("leader") is not None


async def test_entries_are_those_under_the_prefix(store: StoreUnderTest) -> None:
    await store.kv.create("leader", b"l")
    await store.kv.create("worker.a", b"1")
    await store.kv.create("worker.b", b"2")
    assert sorted((e.key, e.value) for e in await store.other.entries("worker.")) == [
        ("worker.a", b"1"),
        ("worker.b", b"2"),
    ]
    assert [e.key for e in await store.kv.entries("leader")] == ["leader"]
    assert len(await store.kv.entries("")) == 3


async def test_of_many_that_write_at_once_one_succeeds(store: StoreUnderTest) -> None:
    first = await store.kv.create("leader", b"")
    clients = [store.kv, store.other] * 8
    tries = [kv.update("leader", str(n).encode(), first) for n, kv in enumerate(clients)]
    answers = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(answer, int) for answer in answers) == 1
    assert sum(isinstance(answer, Conflict) for answer in answers) == 15


async def test_watcher_hears_what_is_written_under_its_prefix(store: StoreUnderTest) -> None:
    heard: asyncio.Queue[Entry | None] = asyncio.Queue()

    async def listen() -> None:
        async with aclosing(store.other.watch("worker.")) as events:
            async for event in events:
                heard.put_nowait(event)

    listening = asyncio.create_task(listen())
    try:
        revision = 0
        async with asyncio.timeout(10):
            while heard.empty():  # a watcher may take a moment to be there
                revision = await (
                    store.kv.update("worker.a", b"x", revision) if revision else store.kv.create("worker.a", b"x")
                )
                await store.kv.entries("worker.")
                await asyncio.sleep(0)
            await store.kv.create("leader", b"not for it")
            last = await store.kv.update("worker.a", b"last", revision)
            while (event := await heard.get()) is None or event.revision < last:
                assert event is None or event.key == "worker.a"
        assert event == Entry("worker.a", b"last", last)
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
