"""Turns and group commit: many calls become few units, and no answer precedes the durability of what it depends on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import heapline
from heapline.contract.call import Context
from heapline.contract.leases import Pop
from heapline.contract.message import Outgoing
from heapline.engine.columns import Columns, EnqueueCall, Identity, check_batch_bytes
from tests.unit.engine import held_io
from tests.unit.engine.rig import Rig, opened, settle


async def test_calls_of_one_turn_become_one_commit() -> None:
    async with opened() as rig:
        before = (await rig.hl.stats("jobs")).log.commits_total
        await asyncio.gather(*(rig.hl.enqueue("jobs", b"x") for _ in range(500)))
        assert (await rig.hl.stats("jobs")).log.commits_total == before + 1


async def test_calls_during_a_commit_gather_for_the_next() -> None:
    async with opened() as rig:
        before = (await rig.hl.stats("jobs")).log.commits_total
        rig.io.hold = {"commit"}
        first = asyncio.create_task(rig.hl.enqueue("jobs", b"first"))
        await settle()
        rest = []
        for _ in range(20):
            rest.append(asyncio.create_task(rig.hl.enqueue("jobs", b"later")))
            await settle(3)
        assert len(rig.io.held) == 1, "one write at a time"
        rig.io.step()
        await settle()
        assert first.done()
        assert not any(task.done() for task in rest)
        rig.io.release()
        await asyncio.gather(*rest)
        assert (await rig.hl.stats("jobs")).log.commits_total == before + 2


async def test_ack_shares_a_commit_with_the_pop_that_follows_a_step_later() -> None:
    async with opened() as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"x")] * 21)
        (message,) = await rig.hl.pop("jobs")
        before = (await rig.hl.stats("jobs")).log.commits_total
        for _ in range(20):
            ack = asyncio.ensure_future(rig.hl.ack(message))
            await settle(2)  # one step calls, the next would be its turn
            (message,) = await rig.hl.pop("jobs")
            await ack
        assert (await rig.hl.stats("jobs")).log.commits_total == before + 20


async def test_ack_is_answered_although_no_pop_follows() -> None:
    async with opened() as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"x")] * 3)
        for _ in range(3):
            (message,) = await rig.hl.pop("jobs")
            await message.ack()
        assert (await rig.hl.stats("jobs")).acked_total == 3


async def prepared(rig: Rig) -> dict[str, Any]:
    hl = rig.hl
    await hl.enqueue("jobs", b"known", idempotency_key="k", priority=-1)
    leased, stale = await hl.enqueue("jobs", b"a"), await hl.enqueue("jobs", b"b")
    await hl.ack(await hl.pop("jobs"))
    messages = await hl.pop("jobs", 2, holder="key:1")
    await messages[1].release()
    return {"leased": leased, "stale": stale, "held": messages[0], "lost": messages[1]}


CALLS: dict[str, Callable[[Any, dict[str, Any]], Awaitable[Any]]] = {
    "a duplicate": lambda hl, p: hl.enqueue("jobs", b"known", idempotency_key="k"),
    "a conflict": lambda hl, p: hl.enqueue("jobs", b"other", idempotency_key="k"),
    "a get": lambda hl, p: hl.get("jobs", p["leased"].id),
    "a peek": lambda hl, p: hl.peek("jobs"),
    "stats": lambda hl, p: hl.stats("jobs"),
    "offsets": lambda hl, p: hl.offsets("jobs"),
    "an empty pop": lambda hl, p: hl.pop("other"),
    "a refused ack": lambda hl, p: hl.ack(p["lost"]),
    "a refused nack": lambda hl, p: hl.nack(p["lost"]),
    "a refused cancel": lambda hl, p: hl.cancel("jobs", p["held"].id),
    "an unknown id": lambda hl, p: hl.cancel("jobs", 1),
    "a pop over the limit of its holder": lambda hl, p: hl.do(Pop("jobs"), Context(principal="key:1", leases_max=1)),
    "a waiting pop over the limit of its holder": lambda hl, p: hl.do(
        Pop("jobs", wait=60), Context(principal="key:1", leases_max=1)
    ),
    "a pop": lambda hl, p: hl.pop("jobs"),
    "an ack": lambda hl, p: hl.ack(p["held"]),
    "a purge of nothing": lambda hl, p: hl.purge("other"),
    "a list of dead letters": lambda hl, p: hl.dlq_list("jobs"),
}


@pytest.mark.parametrize("case", sorted(CALLS))
async def test_every_answer_waits_for_the_events_it_depends_on(case: str) -> None:
    async with opened() as rig:
        facts = await prepared(rig)
        await rig.topic("other")
        rig.io.hold = {"commit"}
        blocked = [
            asyncio.create_task(rig.hl.enqueue(name, b"not durable yet", delay=60)) for name in ("jobs", "other")
        ]
        await settle()
        answer = asyncio.ensure_future(CALLS[case](rig.hl, facts))
        await settle()
        assert not answer.done()
        rig.io.release()
        await asyncio.gather(*blocked)
        done, _ = await asyncio.wait([answer], timeout=20)
        assert done
        if answer.exception() is not None:
            assert isinstance(answer.exception(), heapline.HeaplineError)


Pair = tuple[Callable[[Any], Awaitable[Any]], Callable[[Any], Awaitable[Any]]]
AFTER_A_CHANGE: dict[str, Pair] = {
    "a schedule that was deleted": (lambda hl: hl.delete_schedule("hourly"), lambda hl: hl.get_schedule("hourly")),
    "a fetch of a group that was deleted": (
        lambda hl: hl.delete_group("jobs", "g"),
        lambda hl: hl.group_fetch("jobs", "g", "m", session="s"),
    ),
    "a fetch of a group with other settings": (
        lambda hl: hl.create_group("jobs", "new", ack_timeout=60),
        lambda hl: hl.group_fetch("jobs", "new", "m", session="s", config={"ack_timeout": 90}),
    ),
    "a reset of a group that was deleted": (
        lambda hl: hl.delete_group("jobs", "g"),
        lambda hl: hl.reset_offsets("jobs", "g", to="latest"),
    ),
    "a list without the batch that was aborted": (lambda hl: hl.abort_batch("b"), lambda hl: hl.list_batches()),
}


@pytest.mark.parametrize("case", sorted(AFTER_A_CHANGE))
async def test_answer_waits_for_the_change_that_it_reports(case: str) -> None:
    change, look = AFTER_A_CHANGE[case]
    async with opened() as rig:
        await rig.hl.create_schedule("hourly", topic="jobs", payload=b"x", every=3600)
        await rig.hl.create_group("jobs", "g")
        await rig.hl.group_fetch("jobs", "g", "m", session="s")
        await rig.hl.prepare_batch("b", "part", {"jobs": [Outgoing(b"x")]})
        rig.io.hold = {"commit"}
        changing = asyncio.ensure_future(change(rig.hl))
        await settle()
        answer = asyncio.ensure_future(look(rig.hl))
        await settle()
        assert not changing.done()
        assert not answer.done()
        rig.io.release()
        await changing
        await asyncio.wait([answer], timeout=20)
        if answer.exception() is not None:
            assert isinstance(answer.exception(), heapline.HeaplineError)


async def test_message_is_delivered_only_when_its_lease_is_durable() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        rig.io.hold = {"commit"}
        pop = asyncio.create_task(rig.hl.pop("jobs"))
        await settle()
        assert not pop.done()
        crashed = Rig(rig.disk.crash())
        await crashed.open()
        assert (await crashed.hl.stats("jobs")).ready == 1, "after a power cut it would still be ready"
        await crashed.hl.close()
        rig.io.release()
        assert len(await pop) == 1
        crashed = Rig(rig.disk.crash())
        await crashed.open()
        assert (await crashed.hl.stats("jobs")).leased == 1
        await crashed.hl.close()


async def test_pop_sees_enqueues_of_the_same_turn() -> None:
    async with opened() as rig:
        pop, _ = await asyncio.gather(rig.hl.pop("jobs"), rig.hl.enqueue("jobs", b"x"))
        assert [m.payload for m in pop] == [b"x"]


async def test_ack_in_the_turn_that_would_record_the_expiry_succeeds() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        (m,) = await rig.hl.pop("jobs", visibility=1)
        rig.clock.advance(5)
        await m.ack()  # the deadline is long past, but its expiry is not recorded
        assert (await rig.hl.get("jobs", m.id)).state == "acked"


async def test_calls_larger_than_a_unit_are_cut_into_several() -> None:
    async with opened() as rig:
        await asyncio.gather(*(rig.hl.enqueue("jobs", b"x" * 200_000) for _ in range(20)))
        assert (await rig.hl.stats("jobs")).ready == 20
        hl = await rig.reopen()
        assert len(await hl.pop("jobs", 30, max_bytes=1 << 30)) == 20


async def test_leases_of_more_messages_than_one_frame_holds() -> None:
    async with opened() as rig:
        for _ in range(10):
            await rig.hl.enqueue_batch("jobs", [Outgoing(b"")] * 5000, atomic=False)
        messages = await rig.hl.pop("jobs", 50_000, max_bytes=1 << 40)
        assert len(messages) == 50_000
        await rig.hl.nack(messages, backoff=60, reason="all of them")
        hl = await rig.reopen()
        assert (await hl.stats("jobs")).delayed == 50_000
        assert await hl.purge("jobs") == 50_000


async def test_calls_without_changes_write_nothing() -> None:
    async with opened() as rig:
        facts = await prepared(rig)
        before = (await rig.hl.stats("jobs")).log.commits_total, await rig.hl.offsets("jobs")
        await rig.hl.enqueue("jobs", b"known", idempotency_key="k")
        await rig.hl.pause_topic("jobs")
        for _ in range(3):
            assert await rig.hl.pop("jobs") == []
        await rig.hl.resume_topic("jobs")
        await rig.hl.resume_topic("jobs")
        with pytest.raises(heapline.LeaseLost):
            await facts["lost"].ack()
        assert await rig.hl.dlq_replay("jobs") == 0
        after = (await rig.hl.stats("jobs")).log.commits_total, await rig.hl.offsets("jobs")
        assert after == (before[0] + 2, {0: (0, before[1][0][1] + 2)}), "only a pause and a resume"


async def test_close_makes_decisions_durable_and_answers_them() -> None:
    rig = Rig()
    hl = await rig.open()
    await rig.topic()
    rig.io.hold = {"commit"}
    call = asyncio.create_task(hl.enqueue("jobs", b"x"))
    await settle()
    closing = asyncio.create_task(hl.close())
    await settle()
    rig.io.release()
    await closing
    assert (await call).id
    hl = await rig.open()
    assert (await hl.stats("jobs")).ready == 1
    await hl.close()


async def test_idle_waiting_pop_takes_no_turns() -> None:
    """`wait=` wakes immediately and does not poll: an idle topic with a waiting pop plans nothing."""
    async with opened() as rig:
        pop = asyncio.create_task(rig.hl.pop("jobs", wait=60))
        await settle()
        turns = 0
        turn = rig.runner().turns._run

        def counted() -> None:
            nonlocal turns
            turns += 1
            turn()

        rig.runner().turns._run = counted  # type: ignore[method-assign]
        await asyncio.sleep(0.05)
        assert turns == 0
        await rig.hl.enqueue("jobs", b"x")
        assert [m.payload for m in await pop] == [b"x"]


@pytest.mark.parametrize("partitions", [1, 500])
@pytest.mark.parametrize(
    "shape",
    [
        {"payload": b""}, {"payload": b"x"}, {"payload": b"x" * 17}, {"payload": b"x", "key": "k"},
        {"payload": b"x" * 100, "headers": {"a": "b"}}, {"payload": b"x", "idempotency_key": True},
        {"payload": b"x", "key": "k", "idempotency_key": True, "seq": True}, {"payload": b"x" * 50_000},
        {"payload": b"", "seq": True},
    ],
    ids=lambda shape: ", ".join(shape),
)  # fmt: skip
async def test_atomic_batch_of_the_largest_size_allowed_is_written(shape: dict[str, Any], partitions: int) -> None:
    """A batch that passes the size check must fit into a unit; otherwise the topic would fail and reload."""
    async with opened() as rig:
        config = await rig.topic("wide", partitions=partitions)

        def batch(count: int) -> list[Outgoing]:
            own = {"idempotency_key": lambda i: f"key {i}", "seq": lambda i: i}
            return [
                Outgoing(**{name: own[name](i) if name in own else value for name, value in shape.items()})
                for i in range(count)
            ]

        producer: dict[str, Any] = {"producer_id": "p" * 128, "epoch": 1} if "seq" in shape else {}
        low, high = 1, 20_000  # the largest batch that is accepted
        messages = batch(high)
        while low < high:
            middle = (low + high + 1) // 2
            if _is_let_in(messages[:middle], config):
                low = middle
            else:
                high = middle - 1
        results = await rig.hl.enqueue_batch("wide", messages[:low], **producer)
        assert len(results) == low > 10
        with pytest.raises(heapline.BadRequest, match="atomic=False"):
            await rig.hl.enqueue_batch("wide", messages[: low + 1], **producer)
        assert (await rig.hl.stats("wide")).ready == low
        assert (await rig.hl.stats("wide")).log.reloads_total == 0


def _is_let_in(messages: list[Outgoing], config: heapline.TopicConfig) -> bool:
    identity = None if messages[0].seq is None else Identity("p", 1, 0)
    call = EnqueueCall(asyncio.get_running_loop().create_future(), columns=Columns(messages), identity=identity)
    try:
        check_batch_bytes(call, config)
    except heapline.BadRequest:
        return False
    return True


def test_extend_returns_the_durable_deadline() -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened()
        await hl.enqueue("jobs", b"x")
        (message,) = await hl.pop("jobs", visibility=30)
        now = hl.topics._runners["jobs"].steady.now().steady
        await held_io.spin()
        rig.io.hold, rig.io.answers_held = {"commit"}, True
        first = asyncio.ensure_future(hl.extend(message, 60))
        await held_io.spin()
        second = asyncio.ensure_future(hl.extend(message, 6000))
        await held_io.spin()
        rig.disk.inject("fdatasync", path=".seg")
        rig.io.let_go()
        await first
        with pytest.raises(heapline.TopicReloading):
            await second
        assert message._deadline_ms == now + 60_000

    held_io.play(scene)
