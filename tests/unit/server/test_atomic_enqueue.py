"""Enqueues over several topics are atomic, and what a failed one leaves blocks no later one."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import msgspec
import pytest

import heapline
from heapline.contract.batches import AbortBatch, ForgetBatch
from heapline.contract.call import HERE
from heapline.contract.message import Outgoing
from heapline.server.protocols.mqueue import IN_PROGRESS_MS, PREFIX, AtomicEnqueue
from tests.unit.engine.rig import Rig, opened, settle, until


def shares(payload: bytes = b"x", key: str | None = None) -> dict[str, list[Outgoing]]:
    return {name: [Outgoing(payload, idempotency_key=key)] for name in ("jobs", "other")}


async def ready(rig: Rig) -> tuple[int, int]:
    return (await rig.hl.stats("jobs")).ready, (await rig.hl.stats("other")).ready


async def serving(rig: Rig) -> None:
    await until(lambda: all(rig.runner(name).is_serving for name in ("jobs", "other")))


async def test_rejected_batch_leaves_nothing() -> None:
    async with opened() as rig:
        await rig.topic("other")
        batches = AtomicEnqueue(rig.hl)
        await rig.hl.enqueue("other", b"first", idempotency_key="k")
        with pytest.raises(heapline.IdempotencyConflict):
            await batches.enqueue(shares(b"another", "k"))
        with pytest.raises(heapline.TopicNotFound):
            await batches.enqueue({"jobs": [Outgoing(b"x")], "nowhere": [Outgoing(b"x")]})
        assert await rig.hl.list_batches() == []
        assert await ready(rig) == (0, 1)


@pytest.mark.parametrize("path", ["/jobs.", "/other.", "/batches."])
async def test_retry_with_the_same_keys_after_a_failed_write_creates_one_message_per_topic(path: str) -> None:
    async with opened() as rig:
        await rig.topic("other")
        batches = AtomicEnqueue(rig.hl)
        await batches.enqueue(shares(b"before"))
        rig.disk.inject("pwritev", errno.EIO, path=path)
        with pytest.raises(heapline.UnavailableError):
            await batches.enqueue(shares(b"x", "k"))
        await serving(rig)
        async with asyncio.timeout(20):
            while True:
                try:
                    answers = await batches.enqueue(shares(b"x", "k"))
                    break
                except heapline.TopicReloading:
                    await asyncio.sleep(0.01)
        assert await batches.enqueue(shares(b"x", "k")) == {
            name: [msgspec.structs.replace(e, duplicate=True) for e in reported] for name, reported in answers.items()
        }
        assert await ready(rig) == (2, 2)
        assert {b.state for b in await rig.hl.list_batches()} == {"committed"}


async def test_parts_prepared_by_a_killed_run_are_dropped_by_the_next() -> None:
    async with opened() as rig:
        await rig.topic("other")
        await rig.hl.prepare_batch(f"{PREFIX}earlier:1", "all", shares(b"x", "k"))
        await rig.hl.prepare_batch("somebody's", "all", shares(b"y"))
        await rig.reopen()
        with pytest.raises(heapline.BatchInDoubt):
            await rig.hl.enqueue("jobs", b"x", idempotency_key="k")
        await AtomicEnqueue(rig.hl).enqueue({"jobs": [Outgoing(b"x", idempotency_key="k")]})
        assert [b.batch_id for b in await rig.hl.list_batches()] == ["somebody's"]
        assert await ready(rig) == (1, 0)


async def test_parts_cancelled_before_their_commit_are_dropped_by_the_next() -> None:
    async with opened() as rig:
        await rig.topic("other")
        batches = AtomicEnqueue(rig.hl)
        await batches.enqueue(shares(b"before"))
        rig.io.hold = {"commit"}
        call = asyncio.ensure_future(batches.enqueue(shares(b"x", "k")))
        await settle()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        rig.io.release()
        await settle()
        await batches.enqueue(shares(b"x", "k"))
        assert await ready(rig) == (2, 2)


async def test_batch_that_cannot_be_dropped_is_dropped_later_without_blocking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened() as rig:
        await rig.topic("other")
        batches = AtomicEnqueue(rig.hl)
        await rig.hl.enqueue("other", b"first", idempotency_key="k")
        do = rig.hl.do

        def away(command: Any, context: Any = HERE) -> Any:
            if isinstance(command, AbortBatch):
                raise heapline.TopicReloading("jobs", "it is away")
            return do(command, context)

        with monkeypatch.context() as patch:
            patch.setattr(rig.hl, "do", away)
            with pytest.raises(heapline.IdempotencyConflict):  # the caller receives the real cause
                await batches.enqueue(shares(b"another", "k"))
            await batches.enqueue({"jobs": [Outgoing(b"x")]})
        left = len(await rig.hl.list_batches())
        await batches.enqueue({"jobs": [Outgoing(b"x")]})
        assert (left, await rig.hl.list_batches()) == (1, [])


async def test_applied_decisions_are_forgotten_and_others_stay() -> None:
    async with opened() as rig:
        await rig.topic("other")
        batches = AtomicEnqueue(rig.hl)
        for _ in range(3):
            await batches.enqueue(shares())
        await rig.hl.prepare_batch("b", "p", shares())
        await rig.hl.commit_batch("b", ["p"])
        await rig.hl.do(ForgetBatch("unknown"))
        await rig.hl.topics.batches.forget_old(3600)
        assert [b.batch_id for b in await rig.hl.list_batches()] == ["b"]
        await rig.reopen()
        assert [b.batch_id for b in await rig.hl.list_batches()] == ["b"]
        assert await ready(rig) == (4, 4)


async def test_batch_of_another_server_is_dropped_only_when_it_is_old() -> None:
    async with opened() as rig:
        await rig.topic("other")
        await rig.hl.prepare_batch(f"{PREFIX}another:1", "all", shares(b"x", "k"))
        now = rig.clock.wall_ms()
        await AtomicEnqueue(rig.hl, True, lambda: now + IN_PROGRESS_MS).enqueue(shares())
        assert [batch.batch_id for batch in await rig.hl.list_batches() if batch.state == "undecided"] != []
        await AtomicEnqueue(rig.hl, True, lambda: now + IN_PROGRESS_MS + 1).enqueue(shares())
        assert [batch.batch_id for batch in await rig.hl.list_batches() if batch.state == "undecided"] == []
