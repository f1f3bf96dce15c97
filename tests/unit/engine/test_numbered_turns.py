"""Numbered calls that share a turn are enqueued together, and each gets the same outcome as in a separate turn."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import heapline
from heapline import Outgoing
from heapline.core.ids import partition_of
from heapline.core.placement import place
from heapline.engine.columns import INT64_MAX
from heapline.engine.duplicates import SHARE_BITS
from tests.simulation.loop import run
from tests.unit.engine.rig import Rig, opened

SHARE = 1 << SHARE_BITS


def batch(first: int, count: int, **options: Any) -> list[Outgoing]:
    return [Outgoing(b"%d" % seq, seq=seq, **options) for seq in range(first, first + count)]


async def blocks_of(rig: Rig, *calls: Any) -> tuple[list[Any], int]:
    """Make calls in one turn. Return their results, and how many blocks of records they used."""
    topic, made = rig.runner().loaded.topic, []
    emit = topic.emit_shared
    topic.emit_shared = lambda *args: (made.append(1), emit(*args))  # type: ignore[method-assign, assignment, func-returns-value]
    try:
        return await asyncio.gather(*calls), len(made)
    finally:
        topic.emit_shared = emit  # type: ignore[method-assign]


async def test_new_numbered_calls_of_a_turn_share_one_block() -> None:
    async with opened() as rig:
        hl = rig.hl
        for name in ("p", "q"):
            await hl.open_producer("jobs", name)

        def begin(name: str, first: int, count: int) -> Any:
            return hl.enqueue_batch("jobs", batch(first, count), producer_id=name, epoch=1)

        single = hl.enqueue("jobs", b"5", producer_id="p", epoch=1, seq=5)
        plain = hl.enqueue("jobs", b"plain")
        calls = begin("p", 0, 5), begin("q", 3, 2), single, plain, begin("p", 7, 3)
        (first, *_, last), blocks = await blocks_of(rig, *calls)
        assert blocks == 1
        await rig.reopen()
        again = await send(rig, batch(0, 10))
        assert [r.duplicate for r in again] == [True] * 6 + [False] + [True] * 3
        assert [r.id for r in again[:5] + again[7:]] == [r.id for r in [*first, *last]]


async def send(rig: Rig, messages: list[Outgoing]) -> list[heapline.Enqueued]:
    return await rig.hl.enqueue_batch("jobs", messages, producer_id="p", epoch=1)


async def test_repeat_in_the_same_turn_gets_the_first_ids() -> None:
    async with opened() as rig:
        await rig.hl.open_producer("jobs", "p")
        first, again = await asyncio.gather(send(rig, batch(0, 5)), send(rig, batch(3, 4)))
        assert [r.id for r in again[:2]] == [r.id for r in first[3:]]
        assert [r.duplicate for r in again] == [True, True, False, False]


async def test_consecutive_numbers_share_a_partition_and_repeats_meet_it() -> None:
    async with opened(topic={"partitions": 16}) as rig:
        await rig.hl.open_producer("jobs", "p")
        first = await send(rig, batch(0, 3 * SHARE))
        placed = [partition_of(r.id) for r in first]
        assert [len(set(placed[share : share + SHARE])) for share in range(0, 3 * SHARE, SHARE)] == [1, 1, 1]
        assert len(set(placed)) > 1
        again = await send(rig, batch(SHARE - 1, 2))
        assert [(r.duplicate, r.id) for r in again] == [(True, r.id) for r in first[SHARE - 1 : SHARE + 1]]


async def test_repeat_after_growth_meets_its_first_with_and_without_key() -> None:
    async with opened() as rig:
        await rig.hl.open_producer("jobs", "p")
        keyed = [Outgoing(b"%d" % seq, seq=seq, key=f"k{seq}") for seq in range(20)]
        first = await send(rig, keyed)
        await rig.hl.update_topic("jobs", partitions=8)
        await send(rig, batch(20, 1))  # every partition records the epoch
        (*fresh,) = await asyncio.gather(*(send(rig, batch(seq, 1)) for seq in range(SHARE, 9 * SHARE, SHARE)))
        assert {partition_of(r.id) for (r,) in fresh} == {0}, "numbers stay in the partitions of the epoch's start"
        again = await asyncio.gather(*(send(rig, [message]) for message in keyed))
        assert [(r.duplicate, r.id) for (r,) in again] == [(True, r.id) for r in first]
        again = await asyncio.gather(*(send(rig, batch(seq, 1)) for seq in range(SHARE, 9 * SHARE, SHARE)))
        assert [(r.duplicate, r.id) for (r,) in again] == [(True, r.id) for (r,) in fresh]


async def test_key_places_new_numbered_messages_over_the_current_partitions() -> None:
    async with opened() as rig:
        await rig.hl.open_producer("jobs", "p")
        await rig.hl.update_topic("jobs", partitions=8)
        await send(rig, batch(0, 1))  # every partition records the epoch
        found = await send(rig, [Outgoing(b"x", seq=seq, key=f"k{seq}") for seq in range(1, 20)])
        assert [partition_of(r.id) for r in found] == place([b"k%d" % seq for seq in range(1, 20)], 8).tolist()


async def test_idempotency_keys_of_numbered_calls_are_recorded() -> None:
    async with opened() as rig:
        await rig.hl.open_producer("jobs", "p")
        await send(rig, batch(0, 1))
        (first,) = await send(rig, [Outgoing(b"x", seq=1, idempotency_key="t")])
        again = await rig.hl.enqueue("jobs", b"x", idempotency_key="t")
        assert (again.duplicate, again.id) == (True, first.id)


async def test_unit_has_space_for_the_names_of_many_producers() -> None:
    names = [f"{number:04}{'x' * 124}" for number in range(1000)]
    async with opened() as rig:
        for name in names:
            await rig.hl.open_producer("jobs", name)
        for seq in range(12):  # units of several sizes, so that some meet the end of a segment
            calls = [rig.hl.enqueue("jobs", b"", producer_id=name, epoch=1, seq=seq) for name in names[25 * seq :]]
            assert not any(result.duplicate for result in await asyncio.gather(*calls))
        assert rig.runner().counters.reloads == 0


@pytest.mark.parametrize("key", [None, "k"])
async def test_repeat_of_the_largest_number_meets_its_first(key: str | None) -> None:
    async with opened(topic={"partitions": 3}) as rig:
        await rig.hl.open_producer("jobs", "p")
        largest = [Outgoing(b"x", seq=INT64_MAX - 1, key=key), Outgoing(b"x", seq=INT64_MAX)]
        first = await send(rig, largest)
        again = [*await send(rig, largest), *await send(rig, largest[1:])]
        assert [(r.duplicate, r.id) for r in again] == [(True, r.id) for r in [*first, first[1]]]


# -- every turn against turns of one call --------------------------------------------------------------------------

# A number near the end of a share, so that calls cross into the next one.
calls = st.fixed_dictionaries(
    {
        "producer": st.sampled_from(("p", "p", "p", "q", None)),
        "first": st.integers(-4, 6),  # relative to the producer's next number
        "count": st.integers(1, 5),
        "step": st.sampled_from((1, 1, 1, 1, 2)),
        "answered": st.integers(0, 12),  # how far below its first number everything is answered
        "payload": st.sampled_from((b"", b"", b"", b"other")),
        "key": st.sampled_from((None, None, None, "k", "mixed")),
        "token": st.sampled_from((None, None, "t")),
        "atomic": st.booleans(),
        "single": st.sampled_from((False, False, True)),
        "epoch": st.sampled_from((0, 0, 0, 0, 0, -1, 1)),
    }
)
moves = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.lists(calls, min_size=1, max_size=6)),
        st.tuples(st.just("turn"), st.lists(calls, min_size=1, max_size=6)),
        st.tuples(st.just("turn"), st.lists(calls, min_size=1, max_size=6)),
        st.tuples(st.just("grow"), st.integers(1, 3)),
        st.tuples(st.just("restart"), st.sampled_from(("snapshot", "crash"))),
        st.tuples(st.just("open"), st.sampled_from(("p", "q"))),
    ),
    min_size=3,
    max_size=12,
)


class Side:
    """A broker that gets the calls of a turn together, or one after the other."""

    def __init__(self, together: bool) -> None:
        self.together = together
        self.rig = Rig()
        self.origins: dict[int, tuple[int, int]] = {}  # id -> call and row that enqueued it
        self.number = 0
        self.order: list[tuple[int, int]] = []

    async def turn(self, requests: list[Any]) -> list[Any]:
        made = [self._request(*request) for request in requests]
        if self.together:
            outcomes = await asyncio.gather(*made, return_exceptions=True)
        else:
            outcomes = []
            for call in made:
                outcomes += await asyncio.gather(call, return_exceptions=True)
        return [self._described(outcome) for outcome in outcomes]

    def _request(self, messages: list[Outgoing], atomic: bool, who: dict[str, Any]) -> Any:
        return self.rig.hl.enqueue_batch("jobs", messages, atomic=atomic, **who)

    def _described(self, outcome: Any) -> Any:
        self.number += 1
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, heapline.HeaplineError), repr(outcome)
            return type(outcome)
        rows: list[Any] = []
        for row, result in enumerate(outcome):
            if result.error is not None:
                rows.append(type(result.error))
            elif result.duplicate:
                rows.append(self.origins[result.id])
            else:
                assert result.id not in self.origins
                self.origins[result.id] = self.number, row
                rows.append("new")
        return rows

    async def restart(self, how: str) -> None:
        if how == "snapshot":
            await self.rig.reopen()
        else:
            clock = self.rig.clock
            self.rig = Rig(self.rig.disk.crash(random.Random(1)))
            self.rig.clock = clock
            await self.rig.open()

    def remembered(self) -> Any:
        """Return what each partition remembers of each producer (epoch, bounds, open numbers), and the topic's size."""
        topic = self.rig.runner().loaded.topic
        states = [partition.state.sequences.to_state()["producers"] for partition in topic.partitions]
        bounds = [sorted(producer[:6] for producer in state) for state in states]
        return topic.ready, bounds, [len(partition.state.sequences) for partition in topic.partitions]

    async def drained(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        while messages := await self.rig.hl.pop("jobs", 1000):
            await self.rig.hl.ack(messages)
            found += [self.origins[m.id] for m in messages]
        return found


class Twins:
    def __init__(self, partitions: int, backlog: int) -> None:
        self.sides = Side(together=True), Side(together=False)
        self.config: dict[str, Any] = {"partitions": partitions, "max_backlog": backlog}
        self.partitions = partitions
        self.next = {"p": SHARE - 8, "q": 0}
        self.epochs = {"p": 1, "q": 1}

    async def play(self, moves: list[tuple[str, Any]]) -> None:
        for side in self.sides:
            await side.rig.open()
            await side.rig.topic(**self.config)
        for move, argument in moves:
            await getattr(self, f"_{move}")(argument)
            one, other = (side.remembered() for side in self.sides)
            assert one == other
        one, other = [sorted(await side.drained()) for side in self.sides]
        assert one == other == sorted(self.sides[0].origins.values())
        for side in self.sides:
            await side.rig.hl.close()

    async def _turn(self, calls: list[dict[str, Any]]) -> None:
        requests = [self._numbered(**call) for call in calls]
        one, other = [await side.turn(requests) for side in self.sides]
        assert one == other

    def _numbered(
        self, producer: str | None, first: int, count: int, step: int, answered: int, payload: bytes, key: str | None,
        token: str | None, atomic: bool, single: bool, epoch: int,
    ) -> Any:  # fmt: skip
        count = 1 if single else count
        who: dict[str, Any] = {}
        seqs: list[int | None] = [None] * count
        if producer is not None:
            start = max(0, self.next[producer] + (0 if first > 3 else first))
            seqs = list(range(start, start + count * step, step))
            self.next[producer] = max(self.next[producer], start + count * step)
            current = max(1, self.epochs[producer] + epoch)
            self.epochs[producer] = max(self.epochs[producer], current)
            who = {"producer_id": producer, "epoch": current, "answered_below": max(0, start - answered)}
        messages = [
            Outgoing(
                payload or b"%d" % (seq or 0), seq=seq, key=None if key is None or (key == "mixed" and i % 2) else key,
                idempotency_key=None if token is None else f"{token}{(seq or 0) % 5}",
            )
            for i, seq in enumerate(seqs)
        ]  # fmt: skip
        return messages, atomic, who

    async def _grow(self, by: int) -> None:
        self.partitions += by
        for side in self.sides:
            await side.rig.hl.update_topic("jobs", partitions=self.partitions)

    async def _restart(self, how: str) -> None:
        for side in self.sides:
            await side.restart(how)

    async def _open(self, producer: str) -> None:
        found = {await side.rig.hl.open_producer("jobs", producer) for side in self.sides}
        (self.epochs[producer],) = found


@settings(max_examples=200, deadline=None)
@given(st.sampled_from((1, 1, 3)), st.sampled_from((0, 0, 12)), moves)
def test_calls_of_a_turn_have_the_outcomes_of_separate_turns(
    partitions: int, backlog: int, moves: list[tuple[str, Any]]
) -> None:
    run(Twins(partitions, backlog).play(moves))
