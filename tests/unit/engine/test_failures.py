"""A failed write: no call is acknowledged, and the topic is reloaded from disk. An fsync is never repeated."""

from __future__ import annotations

import asyncio
import errno

import pytest

import heapline
from heapline.contract.message import Outgoing
from tests.unit.engine import held_io
from tests.unit.engine.rig import Rig, opened, settle, until

SEGMENT = ".seg"


async def serving(rig: Rig, topic: str = "jobs") -> None:
    await until(lambda: rig.runner(topic).is_serving)


@pytest.mark.parametrize("operation", ["fdatasync", "pwritev"])
async def test_failed_commit_acknowledges_no_call_and_reloads_the_topic(operation: str) -> None:
    async with opened() as rig:
        kept = await rig.hl.enqueue("jobs", b"kept")
        rig.disk.inject(operation, errno.EIO, path=SEGMENT)
        calls = [rig.hl.enqueue("jobs", b"%d" % i) for i in range(5)]
        calls += [rig.hl.get("jobs", kept.id), rig.hl.enqueue("jobs", b"kept")]  # type: ignore[list-item]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(a) for a in answers} == {heapline.TopicReloading}
        assert "retry" in str(answers[0])
        await serving(rig)
        stats = await rig.hl.stats("jobs")
        assert stats.log.reloads_total == 1
        assert (await rig.hl.get("jobs", kept.id)).payload == b"kept"
        await rig.hl.enqueue("jobs", b"after")
        found = {m.payload for m in await rig.hl.pop("jobs", 20)}
        assert {b"kept", b"after"} <= found


async def test_retry_with_the_same_key_after_a_failure_makes_one_message() -> None:
    async with opened() as rig:
        rig.disk.inject("fdatasync", path=SEGMENT)
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.enqueue("jobs", b"x", idempotency_key="k")
        await serving(rig)
        await rig.hl.enqueue("jobs", b"x", idempotency_key="k")
        assert (await rig.hl.stats("jobs")).ready == 1


async def test_calls_during_the_reload_raise_topic_reloading() -> None:
    async with opened() as rig:
        rig.io.hold = {"load"}
        rig.disk.inject("fdatasync", path=SEGMENT)
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.enqueue("jobs", b"x")
        await settle()
        for call in (rig.hl.enqueue("jobs", b"x"), rig.hl.pop("jobs"), rig.hl.stats("jobs")):
            with pytest.raises(heapline.UnavailableError):
                await call
        rig.io.release()
        await serving(rig)
        await rig.hl.enqueue("jobs", b"x")


async def test_waiting_pop_survives_the_reload() -> None:
    async with opened() as rig:
        pop = asyncio.create_task(rig.hl.pop("jobs", wait=60))
        await settle()
        rig.disk.inject("fdatasync", path=SEGMENT)
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.enqueue("jobs", b"x", delay=3600)
        await serving(rig)
        await rig.hl.enqueue("jobs", b"y")
        assert [m.payload for m in await pop] == [b"y"]


async def test_lease_whose_commit_failed_was_never_delivered() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        rig.disk.inject("pwritev", path=SEGMENT)
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.pop("jobs")
        await serving(rig)
        stats = await rig.hl.stats("jobs")
        assert stats.ready + stats.leased == 1


async def test_other_topics_continue_during_a_reload() -> None:
    async with opened() as rig:
        await rig.topic("other")
        rig.io.hold = {"load"}
        rig.disk.inject("fdatasync", path="/jobs.")
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.enqueue("jobs", b"x")
        await rig.hl.enqueue("other", b"x")
        assert len(await rig.hl.pop("other")) == 1


async def test_reload_is_tried_again_until_the_disk_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heapline.engine.runner.RELOAD_PAUSE", 0.001)
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"kept")
        rig.disk.inject("fdatasync", path=SEGMENT)
        rig.disk.inject("open", path=SEGMENT, times=3)
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.enqueue("jobs", b"x")
        await serving(rig)
        assert b"kept" in {m.payload for m in await rig.hl.pop("jobs", 5)}


async def test_corruption_found_by_a_reload_is_raised_and_nothing_served() -> None:
    async with opened() as rig:
        for i in range(50):
            await rig.hl.enqueue("jobs", b"%d" % i * 100)
        (segment,) = rig.files(SEGMENT)[:1]
        rig.disk.damage(segment, 3)
        rig.disk.inject("fdatasync", path=SEGMENT)
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.enqueue("jobs", b"x")
        await until(lambda: isinstance(rig.runner().failure, heapline.CorruptionError))
        for call in (rig.hl.pop("jobs"), rig.hl.enqueue("jobs", b"x")):
            with pytest.raises(heapline.JournalCorrupt, match="journal verify") as caught:
                await call
            assert caught.value.path.endswith(SEGMENT)


async def test_fsync_that_failed_is_never_repeated_on_the_same_open_file() -> None:
    async with opened() as rig:
        synced: list[str] = []
        rig.disk.on_step = lambda operation, path: synced.append(f"{operation} {path}")
        rig.disk.inject("fdatasync", path=SEGMENT)
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.enqueue("jobs", b"x")
        await serving(rig)
        at = max(i for i, step in enumerate(synced) if step.startswith("fdatasync") and step.endswith(SEGMENT))
        failed = next(i for i, step in enumerate(synced) if step.startswith("fdatasync") and step.endswith(SEGMENT))
        between = synced[failed + 1 : at + 1]
        assert at == failed or any(step.startswith("open") and step.endswith(SEGMENT) for step in between)


async def test_bug_in_a_turn_reloads_the_topic_instead_of_hanging() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"kept")

        def broken(*_: object) -> None:
            raise RuntimeError("a bug")

        rig.runner().loaded.topic.partitions[0].decide_purge = broken  # type: ignore[assignment,method-assign]
        calls = rig.hl.purge("jobs"), rig.hl.enqueue("jobs", b"x"), rig.hl.pop("jobs"), rig.hl.stats("jobs")
        answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
        assert isinstance(answers[0], heapline.TopicReloading)
        await serving(rig)
        stats = await rig.hl.stats("jobs")
        assert stats.ready + stats.leased >= 1


async def test_totals_continue_across_a_reload() -> None:
    async with opened() as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"x")] * 3)
        await rig.hl.enqueue("jobs", b"y", idempotency_key="k")
        await rig.hl.enqueue("jobs", b"y", idempotency_key="k")
        await rig.hl.ack(await rig.hl.pop("jobs", 2))
        before = await rig.hl.stats("jobs")
        rig.disk.inject("pwritev", path=SEGMENT)
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.enqueue("jobs", b"x")
        await serving(rig)
        after = await rig.hl.stats("jobs")
        names = ("enqueued_total", "duplicates_total", "leased_total", "acked_total")
        assert all(getattr(after, name) >= getattr(before, name) > 0 for name in names)
        assert after.log.commits_total >= before.log.commits_total > 0


async def test_corrupt_record_is_set_aside_and_reported() -> None:
    async with opened(cache_bytes=0) as rig:
        ids = [(await rig.hl.enqueue("jobs", bytes([65 + i]) * 2000)).id for i in range(5)]
        hl = await rig.reopen()
        (segment,) = rig.files(SEGMENT)[:1]
        data = rig.disk.contents()[segment]
        rig.disk.damage(segment, data.index(b"C" * 2000) // 512 + 1)
        messages = await hl.pop("jobs", 10)
        assert [m.id for m in messages] == ids[:2] + ids[3:]
        assert (await hl.stats("jobs")).log.corrupt_records_total == 1
        (dead,) = await hl.dlq_list("jobs")
        assert (dead.id, dead.reason, dead.payload) == (ids[2], "record corrupt", None)


async def test_corrupt_record_does_not_affect_other_pops_of_its_turn() -> None:
    async with opened(cache_bytes=0) as rig:
        ids = [(await rig.hl.enqueue("jobs", bytes([65 + i]) * 2000)).id for i in range(5)]
        hl = await rig.reopen()
        (segment,) = rig.files(SEGMENT)[:1]
        rig.disk.damage(segment, rig.disk.contents()[segment].index(b"C" * 2000) // 512 + 1)
        answers = await asyncio.gather(*(hl.pop("jobs") for _ in range(4)))
        assert [[m.id for m in answer] for answer in answers] == [[ids[0]], [ids[1]], [ids[4]], [ids[3]]]
        assert [m.payload[:1] for answer in answers for m in answer] == [b"A", b"B", b"E", b"D"]


async def test_messages_with_temporarily_unreadable_records_are_released() -> None:
    async with opened(cache_bytes=0) as rig:
        await rig.hl.enqueue("jobs", b"x" * 2000)
        hl = await rig.reopen()
        rig.disk.inject("pread", path=SEGMENT, times=4)
        answers = []
        for _ in range(5):
            try:
                answers.append(await hl.pop("jobs", wait=5))
                break
            except heapline.UnavailableError as error:
                answers.append([error])  # type: ignore[list-item]
        stats = await hl.stats("jobs")
        delivered = [m for m in answers[-1] if isinstance(m, heapline.Message)]
        assert len(delivered) + stats.dead == 1
        assert (stats.leased, stats.ready) == (len(delivered), 0)


async def test_close_during_an_unreported_failed_write_ends_cleanly() -> None:
    """The thread knows that the write failed before the loop does; closing may begin in between."""
    async with opened() as rig:
        rig.io.hold = {"commit"}
        asked = asyncio.ensure_future(rig.hl.enqueue("jobs", b"x"))
        await settle()
        ((future, commit, unit),) = rig.io.held
        rig.io.held.clear()
        rig.disk.inject("pwritev", path="jobs.")
        with pytest.raises(OSError, match="injected") as failed:
            commit(*unit)
        closing = asyncio.ensure_future(rig.hl.close())
        await settle()
        future.set_exception(failed.value)
        await closing
        with pytest.raises(heapline.TopicReloading):
            await asked


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_reload_does_not_move_the_time_that_leases_run_on(jump: float) -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened()
        await hl.enqueue("jobs", b"x")
        await hl.pop("jobs", visibility=600)
        rig.clock.advance(60)
        before = hl.topics._runners["jobs"].steady.now().steady
        rig.clock.jump_wall(jump)
        rig.disk.inject("fdatasync", path=".seg")
        with pytest.raises(heapline.TopicReloading):
            await hl.enqueue("jobs", b"y", delay=1e6)
        await asyncio.sleep(5)
        assert hl.topics._runners["jobs"].steady.now().steady == before + 5000
        assert await hl.pop("jobs") == []

    held_io.play(scene)


def test_pop_in_a_turn_that_fails_raises_instead_of_hanging() -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened()
        await hl.enqueue("jobs", b"x")
        await held_io.spin()
        rig.disk.inject("fdatasync", path=".seg")
        rig.io.hold, rig.io.answers_held = {"commit"}, True
        enqueueing = asyncio.ensure_future(hl.enqueue("jobs", b"y"))
        await held_io.spin()
        popping = asyncio.ensure_future(hl.pop("jobs"))
        await held_io.spin()
        rig.io.let_go()
        await asyncio.wait([popping, enqueueing], timeout=5)
        for call in (popping, enqueueing):
            assert isinstance(call.exception(), heapline.TopicReloading)
        await asyncio.sleep(1)
        assert len(await hl.pop("jobs")) == 1

    held_io.play(scene)


def test_wait_ends_when_the_only_message_turns_out_to_be_damaged() -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened({"cache_bytes": 0})
        await hl.enqueue("jobs", bytes(2000))
        await hl.enqueue("jobs", b"drives the first from memory", delay=1e6)
        rig.disk.damage(hl.topics._runners["jobs"].loader.directory + "/0000000001.seg", 3, "garbage")
        async with asyncio.timeout(60):
            assert await hl.pop("jobs", wait=2) == []

    held_io.play(scene)


def test_too_many_open_files_make_no_dead_letters() -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened({"cache_bytes": 0})
        await hl.enqueue_batch("jobs", [Outgoing(bytes(2000))] * 10)
        await hl.enqueue("jobs", b"drives the others from memory", delay=1e6)
        rig.disk.inject("open", errno.EMFILE, path=".seg")
        with pytest.raises(heapline.TopicReloading):
            await hl.pop("jobs", 10)
        stats = await hl.stats("jobs")
        assert (stats.ready, stats.dead, stats.leased) == (10, 0, 0)

    held_io.play(scene)
