"""Connections that break after the server has acted: the client repeats the call, and it counts once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.client.sdk import ConnectedBroker
from heapline.contract.errors import LeaseLost, MessageNotFound, UnavailableError
from heapline.contract.message import Message, Outgoing
from tests.integration.proxy import Proxy
from tests.integration.server_rig import Rig, until

SMALL = {"segment_bytes": 1 << 20, "max_payload_bytes": 1 << 16}


class Cut:
    """A server, a client behind a proxy, and a way to lose the next response."""

    def __init__(self, rig: Rig, proxy: Proxy, hl: ConnectedBroker) -> None:
        self.rig, self.proxy, self.hl = rig, proxy, hl

    async def lose_answer(self, call: Awaitable[Any]) -> Any:
        """Let the server execute the call, lose its response with the connection, and let the client continue."""
        self.proxy.hold()
        calling = asyncio.ensure_future(call)
        await asyncio.wait_for(self.proxy.taken.wait(), 20)
        self.proxy.cut()
        return await asyncio.wait_for(calling, 30)

    async def counts(self) -> tuple[int, int, int, int]:
        stats = await self.rig.behind.stats("jobs")
        return stats.ready, stats.delayed, stats.leased, stats.dead


@pytest.fixture
async def cut(tmp_path: Path) -> AsyncIterator[Cut]:
    async with Rig(tmp_path) as rig, Proxy(rig.target) as proxy:
        await rig.behind.create_topic("jobs", **rig.small)
        async with heapline.connect(proxy.target, deadline=20) as hl:
            await hl.stats("jobs")  # it is connected
            yield Cut(rig, proxy, hl)


async def leased(cut: Cut, count: int = 1) -> list[Message]:
    await cut.hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(count)])
    return await cut.hl.pop("jobs", count)


async def test_repeated_enqueue_is_stored_once_and_not_reported_as_duplicate(cut: Cut) -> None:
    result = await cut.lose_answer(cut.hl.enqueue("jobs", b"once"))
    assert not result.duplicate
    assert await cut.counts() == (1, 0, 0, 0)
    assert (await cut.hl.get("jobs", result.id)).payload == b"once"


async def test_repeated_enqueue_is_not_duplicated_after_its_key_scope_ended(cut: Cut) -> None:
    cut.proxy.hold()
    calling = asyncio.ensure_future(cut.hl.enqueue("jobs", b"x", idempotency_key="k", idempotency_scope="pending"))
    await asyncio.wait_for(cut.proxy.taken.wait(), 20)
    (message,) = await cut.rig.behind.pop("jobs", wait=5)  # the scope ends here
    cut.proxy.cut()
    assert (await calling).id == message.id
    assert await cut.counts() == (0, 0, 1, 0)


@pytest.mark.parametrize("atomic", [True, False])
async def test_repeated_batch_is_stored_once(cut: Cut, atomic: bool) -> None:
    batch = [Outgoing(b"%d" % i, priority=i) for i in range(10)]
    results = await cut.lose_answer(cut.hl.enqueue_batch("jobs", batch, atomic=atomic))
    assert [m.payload for m in await cut.hl.pop("jobs", 20)] == [b"%d" % i for i in range(10)]
    assert not any(r.duplicate or r.error for r in results)


async def test_repeated_message_of_a_producer_is_stored_once(cut: Cut) -> None:
    producer = heapline.Producer("p1")
    await cut.hl.enqueue("jobs", b"first", producer=producer)
    assert not (await cut.lose_answer(cut.hl.enqueue("jobs", b"x", producer=producer))).duplicate
    assert await cut.counts() == (2, 0, 0, 0)


async def test_repeated_pop_returns_the_leases_of_its_lost_response(cut: Cut) -> None:
    await cut.hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, priority=i) for i in range(6)])
    messages = await cut.lose_answer(cut.hl.pop("jobs", 4))
    assert [m.payload for m in messages] == [b"0", b"1", b"2", b"3"]
    assert await cut.counts() == (2, 0, 4, 0)
    await cut.hl.ack(messages)
    assert await cut.counts() == (2, 0, 0, 0)


async def test_repeated_pop_extends_the_leases_of_its_lost_response(cut: Cut) -> None:
    ids = [r.id for r in await cut.hl.enqueue_batch("jobs", [Outgoing(b"x")] * 2)]
    cut.proxy.hold()
    popping = asyncio.ensure_future(cut.hl.pop("jobs", 2, visibility=60))
    await asyncio.wait_for(cut.proxy.taken.wait(), 20)
    given = (await cut.rig.behind.get("jobs", ids[0])).deadline
    cut.rig.clock.advance(40)
    cut.proxy.cut()
    messages = await asyncio.wait_for(popping, 30)
    assert [m.id for m in messages] == ids
    assert given is not None
    assert all((m.deadline - given).total_seconds() == 40 for m in messages)


@pytest.mark.parametrize("ends", ["cancelled", "given up"])
async def test_leases_of_an_abandoned_pop_are_returned(cut: Cut, ends: str) -> None:
    await cut.hl.enqueue("jobs", b"x")
    cut.proxy.hold()
    popping = asyncio.ensure_future(cut.hl.within(1.5 if ends == "given up" else 20).pop("jobs", visibility=3600))
    await asyncio.wait_for(cut.proxy.taken.wait(), 20)
    assert await cut.rig.leased() == 1 or popping.done()  # on a slow machine its time may be over by now
    if ends == "cancelled":
        popping.cancel()
    await asyncio.wait({popping})
    cut.proxy.cut()
    await until(lambda: nothing_leased(cut))


@pytest.mark.parametrize("within", [False, True])
async def test_closed_consumer_has_returned_what_its_last_pop_leased(
    cut: Cut, within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heapline.client.consumer.CLOSE_SECONDS", 60.0)
    monkeypatch.setattr("heapline.client.transports.transport.RETURN_SECONDS", 60.0)
    hl = cut.hl.within(20) if within else cut.hl
    consumer = hl.consume_batches("jobs") if within else hl.consume("jobs", visibility=3600)
    waiting = asyncio.ensure_future(anext(consumer, None))
    await cut.hl.stats("jobs")  # the pop was sent before
    cut.proxy.hold()
    await cut.rig.behind.enqueue("jobs", b"x")
    await asyncio.wait_for(cut.proxy.taken.wait(), 20)
    assert await cut.rig.leased() == 1
    closing = asyncio.ensure_future(consumer.aclose())
    await asyncio.wait({closing}, timeout=0.3)
    assert not closing.done(), "no answer has arrived yet"
    cut.proxy.flow()
    await closing
    assert await cut.rig.leased() == 0
    assert await waiting is None


async def test_ack_with_a_lost_response_reports_no_lost_lease(cut: Cut) -> None:
    one, two, three = await leased(cut, 3)
    await cut.lose_answer(one.ack())
    await cut.lose_answer(cut.hl.ack([two, three]))
    assert await cut.counts() == (0, 0, 0, 0)


async def test_extend_with_a_lost_response_succeeds(cut: Cut) -> None:
    (message,) = await leased(cut)
    before = message.deadline
    await cut.lose_answer(message.extend(300))
    assert (message.deadline - before).total_seconds() > 200


@pytest.mark.parametrize(
    ("act", "after"),
    [
        (lambda m: m.nack(backoff=60), (0, 1, 0, 0)),
        (lambda m: m.nack(backoff=0), (1, 0, 0, 0)),
        (lambda m: m.release(), (1, 0, 0, 0)),
        (lambda m: m.bury("bad"), (0, 0, 0, 1)),
    ],
    ids=["nack", "nack-at-once", "release", "bury"],
)
async def test_repeated_settlement_that_succeeded_does_not_raise(
    cut: Cut, act: Callable[[Message], Awaitable[None]], after: tuple[int, ...]
) -> None:
    (message,) = await leased(cut)
    await cut.lose_answer(act(message))
    assert await cut.counts() == after


async def test_repeated_bury_reports_a_lost_lease(cut: Cut) -> None:
    (message,) = await leased(cut)
    await cut.rig.behind.release(message)
    with pytest.raises(LeaseLost) as caught:
        await cut.lose_answer(message.bury("bad"))
    assert caught.value.lost == [message.id]
    assert await cut.counts() == (1, 0, 0, 0)


@pytest.mark.parametrize("act", ["nack", "release", "bury", "ack"])
async def test_lost_lease_is_raised_when_no_call_was_repeated(cut: Cut, act: str) -> None:
    (message,) = await leased(cut)
    await cut.rig.behind.release(message)
    with pytest.raises(LeaseLost):
        await getattr(message, act)()


async def test_cancel_with_a_lost_response_succeeds_and_an_invalid_one_fails(cut: Cut) -> None:
    result = await cut.hl.enqueue("jobs", b"x")
    await cut.lose_answer(cut.hl.cancel("jobs", result.id))
    assert (await cut.hl.get("jobs", result.id)).state == "cancelled"
    with pytest.raises(MessageNotFound):
        await cut.hl.cancel("jobs", result.id)
    (message,) = await leased(cut)
    await message.ack()
    with pytest.raises(MessageNotFound):
        await cut.lose_answer(cut.hl.cancel("jobs", message.id))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("DlqReplay", lambda hl: hl.dlq_replay("jobs")),
        ("Purge", lambda hl: hl.purge("jobs")),
        ("DlqDelete", lambda hl: hl.dlq_delete("jobs", where=heapline.DlqFilter())),
        ("DeleteHeap", lambda hl: hl.delete_topic("jobs")),
        ("DeleteGroup", lambda hl: hl.delete_group("jobs", "g")),
        ("ResetOffsets", lambda hl: hl.reset_offsets("jobs", "g", to="latest")),
        ("GroupDeadReplay", lambda hl: hl.group_dead_replay("jobs", "g")),
        ("GroupDeadDelete", lambda hl: hl.group_dead_delete("jobs", "g")),
        ("DeleteSchedule", lambda hl: hl.delete_schedule("s")),
        ("ForgetSink", lambda hl: hl.forget_sink("a sink")),
        ("EndLeases", lambda hl: hl.end_leases("jobs", [1])),
    ],
)
async def test_call_that_must_not_be_repeated_is_not(cut: Cut, name: str, call: Any) -> None:
    (message,) = await leased(cut)
    await message.bury()
    await cut.rig.behind.create_group("jobs", "g")
    await cut.rig.behind.create_schedule("s", topic="jobs", every=3600)
    with pytest.raises(UnavailableError, match=f"{name} was sent .* may have been executed.* call again") as caught:
        await cut.lose_answer(call(cut.hl))
    assert type(caught.value) is UnavailableError
    await cut.rig.behind.list_topics()


STATE = {  # the effects or answers of all other calls when their response was lost once
    "create_topic": lambda hl: hl.create_topic("more", partitions=2, **SMALL),
    "update_topic": lambda hl: hl.update_topic("jobs", max_backlog=10),
    "pause_topic": lambda hl: hl.pause_topic("jobs"),
    "resume_topic": lambda hl: hl.resume_topic("jobs"),
    "set_partition_throttled": lambda hl: hl.set_partition_throttled("jobs", 0, True, reason="hot"),
    "snapshot": lambda hl: hl.snapshot("jobs"),
    "record_audit": lambda hl: hl.record_audit("jobs", datetime(2026, 1, 31, tzinfo=UTC), 7),
    "list_topics": lambda hl: hl.list_topics(),
    "stats_series": lambda hl: hl.stats_series("jobs"),
    "due_times": lambda hl: hl.due_times("jobs"),
    "explain": lambda hl: hl.explain("jobs"),
    "list_leases": lambda hl: hl.list_leases("jobs"),
    "list_workers": lambda hl: hl.list_workers(),
    "search_messages": lambda hl: hl.search_messages("jobs", text="there"),
    "dlq_groups": lambda hl: hl.dlq_groups("jobs"),
    "dlq_count": lambda hl: hl.dlq_count("jobs"),
    "list_stats": lambda hl: hl.list_stats(),
    "stats": lambda hl: hl.stats("jobs"),
    "purge_count": lambda hl: hl.purge_count("jobs"),
    "peek": lambda hl: hl.peek("jobs"),
    "dlq_list": lambda hl: hl.dlq_list("jobs"),
    "offsets": lambda hl: hl.offsets("jobs"),
    "list_batches": lambda hl: hl.list_batches(),
    "list_sinks": lambda hl: hl.list_sinks(),
    "get_topic": lambda hl: hl.get_topic("jobs"),
    "describe": lambda hl: hl.describe(),
    "read_audit": lambda hl: hl.read_audit(),
    "commit_batch": lambda hl: hl.commit_batch("b", ["p"]),
    "prepare_batch": lambda hl: hl.prepare_batch("c", "p", {"jobs": [Outgoing(b"c")]}),
    "enqueue": lambda hl: hl.enqueue("jobs", b"n", producer_id="p1", epoch=1, seq=0, answered_below=0),
    "enqueue_batch": lambda hl: hl.enqueue_batch("jobs", [Outgoing(b"n", seq=0)], producer_id="p1", epoch=1),
    "open_producer": lambda hl: hl.open_producer("jobs", "p2"),
    "abort_batch": lambda hl: hl.abort_batch("b"),
    "create_group": lambda hl: hl.create_group("jobs", "h", max_retries=3),
    "get_group": lambda hl: hl.get_group("jobs", "g"),
    "list_groups": lambda hl: hl.list_groups("jobs"),
    "group_offsets": lambda hl: hl.group_offsets("jobs", "g"),
    "group_fetch": lambda hl: hl.group_fetch("jobs", "g", "n", session="t", max_messages=0),
    "group_leave": lambda hl: hl.group_leave("jobs", "g", "m", session="s"),
    "group_dead_list": lambda hl: hl.group_dead_list("jobs", "g"),
    "create_schedule": lambda hl: hl.create_schedule("t", topic="jobs", every=3600),
    "get_schedule": lambda hl: hl.get_schedule("s"),
    "list_schedules": lambda hl: hl.list_schedules(),
    "pause_schedule": lambda hl: hl.pause_schedule("s"),
    "resume_schedule": lambda hl: hl.resume_schedule("s"),
    "start_replay": lambda hl: hl.start_replay("q", "jobs", start="latest"),
    "get_replay": lambda hl: hl.get_replay("r"),
    "list_replays": lambda hl: hl.list_replays(),
    "cancel_replay": lambda hl: hl.cancel_replay("r"),
}


@pytest.mark.parametrize("name", STATE)
async def test_every_other_repeated_call_has_the_effect_of_one(cut: Cut, name: str) -> None:
    await cut.rig.behind.enqueue("jobs", b"there")
    await cut.rig.behind.prepare_batch("b", "p", {"jobs": [Outgoing(b"1"), Outgoing(b"2")]})
    await cut.rig.behind.open_producer("jobs", "p1")
    await cut.rig.behind.group_fetch("jobs", "g", "m", session="s", max_messages=0)
    await cut.rig.behind.create_schedule("s", topic="jobs", every=3600)
    await cut.rig.behind.start_replay("r", "jobs", start="latest")
    answer = await cut.lose_answer(STATE[name](cut.hl))
    schedules = {info.name: info.state for info in await cut.rig.behind.list_schedules()}
    assert schedules == {
        "create_schedule": {"s": "active", "t": "active"}, "pause_schedule": {"s": "paused"},
    }.get(name, {"s": "active"})  # fmt: skip
    replays = {info.name for info in await cut.rig.behind.list_replays()}
    assert replays == ({"q", "r"} if name == "start_replay" else {"r"})
    topics = {info.name: info for info in await cut.rig.behind.list_topics()}
    stats = await cut.rig.behind.stats("jobs")
    assert set(topics) == ({"jobs", "more"} if name == "create_topic" else {"jobs"})
    assert stats.paused == (name == "pause_topic")
    assert (topics["jobs"].config.max_backlog == 10) == (name == "update_topic")
    assert (stats.partitions[0].throttled is not None) == (name == "set_partition_throttled")
    ready = {"commit_batch": 3, "enqueue": 2, "enqueue_batch": 2}
    assert stats.ready == ready.get(name, 1)
    batches = {info.batch_id: info.state for info in await cut.rig.behind.list_batches()}
    assert batches == {
        "commit_batch": {"b": "committed"}, "abort_batch": {}, "prepare_batch": {"b": "undecided", "c": "undecided"},
    }.get(name, {"b": "undecided"})  # fmt: skip
    groups = {info.name: set(info.members) for info in await cut.rig.behind.list_groups("jobs")}
    assert groups == {
        "create_group": {"g": {"m"}, "h": set()}, "group_fetch": {"g": {"m", "n"}}, "group_leave": {"g": set()},
    }.get(name, {"g": {"m"}})  # fmt: skip
    if name == "commit_batch":
        assert answer == 2
    if name == "open_producer":  # the last epoch is the valid one
        assert not (await cut.hl.enqueue("jobs", b"n", producer_id="p2", epoch=answer, seq=0)).duplicate


async def test_every_call_of_the_contract_has_a_test_with_a_lost_response() -> None:
    """Each call listed here is in a test of this file or of the named one; a new method must be added."""
    elsewhere = {
        "enqueue", "enqueue_batch", "pop", "ack", "extend", "nack", "release", "bury", "cancel", "reschedule", "get",
        "dlq_replay", "dlq_delete", "purge", "delete_topic", "read_log", "close", "delete_group", "reset_offsets",
        "group_dead_replay", "group_dead_delete",
        "group_ack", "group_nack", "subscribe",  # test_group_interfaces.py
        "delete_schedule", "replay", "forget_sink", "end_leases", "message_history",
        "scan_messages", "split_messages",  # this broker does not have them
    }  # fmt: skip
    calls = {name for name in dir(heapline.Broker) if not name.startswith("_")}
    assert calls - {"do", "stream", "features", "leases_returned"} == set(STATE) | elsewhere


async def test_history_with_a_lost_response_is_read_again(cut: Cut) -> None:
    result = await cut.hl.enqueue("jobs", b"x")
    history = await cut.lose_answer(cut.hl.message_history("jobs", result.id))
    assert [event.kind for event in history.items] == ["enqueued"]


async def test_reschedule_with_a_lost_response_succeeds(cut: Cut) -> None:
    result = await cut.hl.enqueue("jobs", b"x")
    await cut.lose_answer(cut.hl.reschedule("jobs", result.id, delay=60, priority=3))
    info = await cut.lose_answer(cut.hl.get("jobs", result.id))
    assert (info.state, info.priority) == ("delayed", 3)


async def test_log_read_resumes_where_it_broke(cut: Cut) -> None:
    for i in range(40):
        await cut.rig.behind.enqueue("jobs", b"%d" % i + b"." * 5000)
    offsets: list[int] = []
    cut.proxy.cut_after(50_000)
    async for frame in cut.hl.read_log("jobs"):
        offsets += [row for e in frame.events for row in range(e.offset, e.offset + e.row_count)]
    assert offsets == list(range(40))


async def test_replay_resumes_where_it_broke(cut: Cut) -> None:
    for i in range(40):
        await cut.rig.behind.enqueue("jobs", b"%d" % i + b"." * 5000)
    cut.proxy.cut_after(50_000)
    seen = [row.payload.rstrip(b".") async for row in cut.hl.replay("jobs", rate=1e6)]  # type: ignore[union-attr]
    assert list(dict.fromkeys(seen)) == [b"%d" % i for i in range(40)]
    assert len(seen) == 40


async def test_repeated_start_of_a_replay_returns_the_same_replay(cut: Cut) -> None:
    await cut.rig.behind.enqueue("jobs", b"x")
    await cut.rig.behind.create_topic("more", **SMALL)
    started = await cut.lose_answer(cut.hl.start_replay("r", "jobs", into="more", rate=0.001))
    assert started.name == "r"
    assert (await cut.lose_answer(cut.hl.get_replay("r"))).into == "more"
    assert [info.name for info in await cut.lose_answer(cut.hl.list_replays())] == ["r"]
    ended = await cut.lose_answer(cut.hl.cancel_replay("r"))
    assert ended.state in ("cancelled", "done")
    assert len(await cut.rig.behind.list_replays()) == 1


async def test_next_endpoint_is_used_when_one_fails(cut: Cut) -> None:
    async with (
        Proxy(cut.rig.target) as other,
        heapline.connect(endpoints=[cut.proxy.target, other.target], deadline=20) as hl,
    ):
        await hl.enqueue("jobs", b"1")
        assert (cut.proxy.connections, other.connections) == (2, 0)  # the fixture's own client exists too
        await cut.proxy.close()
        await hl.enqueue("jobs", b"2")
        assert other.connections == 1
    assert await cut.counts() == (2, 0, 0, 0)


async def test_nothing_is_duplicated_or_lost_while_connections_break(cut: Cut) -> None:
    enqueued: dict[bytes, int] = {}
    acked: list[bytes] = []
    count = 240

    async def produce(start: int) -> None:
        for i in range(start, count, 8):
            payload = b"%d" % i
            enqueued[payload] = (await cut.hl.enqueue("jobs", payload)).id

    async def work() -> None:
        while len(acked) < count:
            for message in await cut.hl.pop("jobs", 3, wait=0.5, visibility=3600):
                await message.ack()
                acked.append(message.payload)

    async def disturb() -> None:
        chance = random.Random(5)
        while True:
            await asyncio.sleep(chance.uniform(0.05, 0.2))
            cut.proxy.cut_after(chance.randrange(0, 3000)) if chance.random() < 0.5 else cut.proxy.cut()

    disturbing = asyncio.ensure_future(disturb())
    async with asyncio.timeout(90):
        await asyncio.gather(*(produce(i) for i in range(8)), *(work() for _ in range(4)))
    disturbing.cancel()
    assert sorted(acked) == sorted(enqueued) == sorted(b"%d" % i for i in range(count))
    assert len(set(enqueued.values())) == count
    assert await cut.counts() == (0, 0, 0, 0)


# -- consume -----------------------------------------------------------------------------------------------------------


async def test_consumer_survives_broken_streams_and_keeps_received_messages(cut: Cut) -> None:
    await cut.hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, priority=i) for i in range(12)])
    got: list[bytes] = []
    async with cut.hl.consume("jobs", prefetch=3, visibility=3600) as messages, asyncio.timeout(60):
        async for message in messages:
            got.append(message.payload)
            if len(got) in (2, 6):
                await until(lambda: three_are_here(messages))
                cut.proxy.cut()
            await message.ack()
            if len(got) == 12:
                break
    assert got == [b"%d" % i for i in range(12)], "each once: received messages were used, nothing was leased again"
    await until(lambda: nothing_leased(cut))


async def test_waiting_consumer_gets_later_messages_after_a_stream_breaks(cut: Cut) -> None:
    async with cut.hl.consume("jobs", prefetch=0, visibility=60) as messages:
        waiting = asyncio.ensure_future(anext(messages))
        await until(lambda: is_asked_for(messages))
        cut.proxy.cut()
        await cut.hl.enqueue("jobs", b"later")
        assert (await asyncio.wait_for(waiting, 20)).payload == b"later"


async def is_asked_for(messages: Any) -> bool:
    return messages.prefetcher._granted == 1


async def three_are_here(messages: Any) -> bool:
    return len(messages.prefetcher._here) == 3


async def nothing_leased(cut: Cut) -> bool:
    return not await cut.rig.leased()
