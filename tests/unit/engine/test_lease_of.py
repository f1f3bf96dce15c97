"""`lease_of` returns the current lease of a message once it is durable, never a token that a failure reverts."""

from __future__ import annotations

import asyncio

import pytest

import heapline
from heapline.contract.broker import Broker
from heapline.contract.leases import GetLease
from heapline.contract.message import LeaseRef
from tests.unit.engine.rig import opened, settle, until


async def lease_of(hl: Broker, topic: str, message_id: int | str) -> tuple[int, str | None] | None:
    found = await hl.do(GetLease(topic, message_id))
    return None if found.token is None else (found.token, found.holder)


async def test_lease_of_returns_token_and_holder_only_for_leased_messages() -> None:
    async with opened() as rig:
        ids = [(await rig.hl.enqueue("jobs", b"%d" % i)).id for i in range(4)]
        (first,) = await rig.hl.pop("jobs", holder="a")
        (second,) = await rig.hl.pop("jobs")
        assert await lease_of(rig.hl, "jobs", first.id) == (first.token, "a")
        assert await lease_of(rig.hl, "jobs", first.message_id) == (first.token, "a")
        assert await lease_of(rig.hl, "jobs", second.id) == (second.token, None)
        await first.ack()
        await second.nack(backoff=0)
        for id in (*ids, 0, (1 << 63) - 1):
            assert await lease_of(rig.hl, "jobs", id) is None
        with pytest.raises(heapline.TopicNotFound):
            await lease_of(rig.hl, "nowhere", ids[0])


async def test_lease_of_returns_the_extended_or_new_lease() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        (m,) = await rig.hl.pop("jobs", holder="a")
        await m.extend(100)
        assert await lease_of(rig.hl, "jobs", m.id) == (m.token, "a")
        await m.release()
        (again,) = await rig.hl.pop("jobs", holder="b")
        assert again.token != m.token
        assert await lease_of(rig.hl, "jobs", m.id) == (again.token, "b")


async def test_lease_of_waits_until_the_lease_is_durable() -> None:
    async with opened() as rig:
        id = (await rig.hl.enqueue("jobs", b"x")).id
        rig.io.hold = {"commit"}
        pop = asyncio.ensure_future(rig.hl.pop("jobs", holder="a"))
        await settle()
        look = asyncio.ensure_future(lease_of(rig.hl, "jobs", id))
        await settle()
        assert rig.io.held
        assert not pop.done()
        assert not look.done()
        rig.io.release()
        ((m,), reported) = await asyncio.gather(pop, look)
        assert reported == (m.token, "a")


async def test_lease_of_waits_until_the_end_of_a_lease_is_durable() -> None:
    async with opened() as rig:
        id = (await rig.hl.enqueue("jobs", b"x")).id
        await rig.hl.pop("jobs", holder="a", visibility=1)
        rig.io.hold = {"commit"}
        rig.clock.advance(2)
        looks = [asyncio.ensure_future(lease_of(rig.hl, "jobs", id))]
        await settle()
        looks.append(asyncio.ensure_future(lease_of(rig.hl, "jobs", id)))  # the expiry is decided by now
        await settle()
        assert not looks[1].done()
        rig.io.release()
        assert await looks[1] is None


async def test_lease_of_never_returns_a_token_of_a_failed_commit() -> None:
    """After the reload the same number may be another holder's lease of the same message, so the call waits."""
    async with opened() as rig:
        id = (await rig.hl.enqueue("jobs", b"x")).id
        rig.io.hold = {"commit"}
        lost = asyncio.ensure_future(rig.hl.pop("jobs", holder="a"))
        await settle()
        look = asyncio.ensure_future(lease_of(rig.hl, "jobs", id))
        await settle()
        token = rig.runner().loaded.topic.partitions[0].entries.leases.by_id[id][0]  # it is in memory
        rig.disk.inject("pwritev", path=".seg")
        rig.io.release()
        for call in (lost, look):
            with pytest.raises(heapline.TopicReloading):
                await call
        await until(lambda: rig.runner().is_serving)
        (m,) = await rig.hl.pop("jobs", holder="b")
        assert m.token == token  # another holder's lease under the same number
        assert await lease_of(rig.hl, "jobs", id) == (token, "b")


@pytest.mark.parametrize("how", ["reopen", "reopen after a snapshot"])
async def test_lease_of_survives_a_restart(how: str) -> None:
    async with opened() as rig:
        await rig.topic("wide", partitions=4)
        for name in ("jobs", "wide"):
            for i in range(12):
                await rig.hl.enqueue(name, b"%d" % i, key=str(i))
        held = {
            (m.topic, m.id): (m.token, holder)
            for name in ("jobs", "wide")
            for holder in ("a", None, "é" * 500)
            for m in await rig.hl.pop(name, 3, holder=holder)
        }
        if how != "reopen":
            await rig.hl.snapshot("jobs")
            await rig.hl.snapshot("wide")
        await rig.reopen()
        assert {place: await lease_of(rig.hl, *place) for place in held} == held
        await rig.hl.update_topic("wide", partitions=16)
        assert {place: await lease_of(rig.hl, *place) for place in held} == held
        await rig.hl.ack([LeaseRef(topic, id, token) for (topic, id), (token, _) in held.items()])
        assert {await lease_of(rig.hl, *place) for place in held} == {None}


async def test_lease_of_finds_no_lease_in_a_recreated_topic() -> None:
    async with opened() as rig:
        old = (await rig.hl.enqueue("jobs", b"x")).id
        await rig.hl.pop("jobs", holder="a")
        await rig.hl.delete_topic("jobs")
        await rig.topic()
        new = (await rig.hl.enqueue("jobs", b"y")).id
        (m,) = await rig.hl.pop("jobs", holder="b")
        assert await lease_of(rig.hl, "jobs", old) is None
        assert await lease_of(rig.hl, "jobs", new) == (m.token, "b")
