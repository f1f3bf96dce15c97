"""Cancelled callers leave nothing: no lease, no waiter, no partial change."""

from __future__ import annotations

import asyncio

import pytest

from heapline.contract.leases import Leased
from tests.unit.engine import held_io
from tests.unit.engine.rig import opened, settle


async def test_pop_cancelled_after_its_lease_was_decided_releases_the_message() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        rig.io.hold = {"commit"}
        pop = asyncio.create_task(rig.hl.pop("jobs"))
        await settle()
        assert rig.runner().loaded.topic.leased == 1
        pop.cancel()
        await settle()
        rig.io.release()
        (m,) = await rig.hl.pop("jobs", wait=5)
        assert (m.payload, m.attempts) == (b"x", 1)


async def test_pop_cancelled_while_its_records_are_read_releases_the_messages() -> None:
    async with opened(cache_bytes=0) as rig:
        await rig.hl.enqueue("jobs", b"x" * 1000)
        hl = await rig.reopen()
        rig.io.hold = {"load"}
        pop = asyncio.create_task(hl.pop("jobs"))
        await settle()
        assert not pop.done()
        pop.cancel()
        await settle()
        rig.io.release()
        assert len(await hl.pop("jobs", wait=5)) == 1


async def test_pop_cancelled_as_its_answer_arrives_releases_the_message() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        rig.io.hold = {"commit"}
        pop = asyncio.create_task(rig.hl.pop("jobs"))
        await settle()
        rig.io.release()  # sets the answer; its caller has not run yet
        await asyncio.sleep(0)
        pop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pop
        assert len(await rig.hl.pop("jobs", wait=5)) == 1


@pytest.mark.parametrize("partitions", [1, 4])
async def test_pop_cancelled_with_an_empty_result_changes_nothing(partitions: int) -> None:
    async with opened() as rig:
        await rig.topic("many", partitions=partitions)
        await rig.hl.enqueue("jobs", b"x")
        runner = rig.runner("many")
        pop = asyncio.create_task(rig.hl.pop("many", wait=60))
        await settle()
        (call,) = runner.turns.pops
        call.future.set_result(Leased("many"))  # the answer of a wait that ended; its caller has not run yet
        pop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pop
        await settle()
        assert runner.counters.reloads == 0
        assert await rig.hl.pop("many") == []


async def test_cancelled_waiting_pop_is_forgotten() -> None:
    async with opened() as rig:
        pops = [asyncio.create_task(rig.hl.pop("jobs", wait=60)) for _ in range(3)]
        await settle()
        pops[0].cancel()
        pops[2].cancel()
        await settle()
        await rig.hl.enqueue("jobs", b"x")
        assert [m.payload for m in await pops[1]] == [b"x"]
        await rig.hl.stats("jobs")
        assert not rig.runner().turns.pops


async def test_pop_cancelled_by_the_caller_s_timeout_leaves_no_waiter() -> None:
    async with opened() as rig:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await rig.hl.pop("jobs", wait=60)
        await rig.hl.enqueue("jobs", b"x")
        assert len(await rig.hl.pop("jobs")) == 1


async def test_cancelled_enqueue_is_stored_or_not_and_the_topic_continues() -> None:
    async with opened() as rig:
        rig.io.hold = {"commit"}
        call = asyncio.create_task(rig.hl.enqueue("jobs", b"x"))
        await settle()
        call.cancel()
        await settle()
        rig.io.release()
        await rig.hl.enqueue("jobs", b"y")
        assert (await rig.hl.stats("jobs")).ready == 2


async def test_cancelled_ack_is_still_recorded() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        (m,) = await rig.hl.pop("jobs")
        rig.io.hold = {"commit"}
        ack = asyncio.create_task(m.ack())
        await settle()
        ack.cancel()
        await settle()
        rig.io.release()
        assert (await rig.hl.get("jobs", m.id)).state == "acked"
        await m.ack()  # repeated, because its answer was lost


def test_cancelled_pop_does_not_release_leases_of_its_repetition() -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened()
        await hl.enqueue("jobs", b"x")
        await held_io.spin()
        rig.io.hold = {"commit"}
        first = asyncio.ensure_future(hl.pop("jobs", request_id="r"))
        await held_io.spin()
        first.cancel()
        await held_io.spin()
        second = asyncio.ensure_future(hl.pop("jobs", request_id="r"))
        await held_io.spin()
        rig.io.let_go()
        (message,) = await second
        await held_io.spin()
        assert await hl.pop("jobs") == []
        await message.ack()

    held_io.play(scene)


def test_cancelled_create_topic_does_not_drop_another_topic_from_the_catalog() -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened()
        rig.io.hold, rig.io.answers_held = {"make_topic"}, False
        making = asyncio.ensure_future(hl.create_topic("a", **held_io.SMALL))
        await held_io.spin()
        making.cancel()
        await held_io.spin()
        other = asyncio.ensure_future(hl.create_topic("b", **held_io.SMALL))
        await held_io.spin()
        assert not other.done()  # it waits until the thread of the first one has ended
        rig.io.let_go()
        await other
        await hl.enqueue("a", b"x")
        await hl.enqueue("b", b"x")
        await hl.close()
        again = await rig.broker().__aenter__()
        assert [info.name for info in await again.list_topics()] == ["a", "b", "jobs"]

    held_io.play(scene)
