"""The pops of one topic on this node. They are served in the order in which they came, together in one transaction.

A pop that finds nothing waits here, in its place, until a wakeup, the next poll, or the end of its time. The leases of
a pop whose caller has gone are released at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import msgspec

from heapline.contract.columns import pack
from heapline.contract.errors import BadRequest, HeaplineError, ResourceExhausted
from heapline.contract.leases import Leased, LeasedMessages
from heapline.core.ids import unix_ms_of
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks
from heapline.sql.home import Home
from heapline.sql.layout import Place, by_slot
from heapline.sql.retries import Held, release
from heapline.sql.settlement import settle
from heapline.sql.shard import Topic, Turn
from heapline.sql.statements import statement

log = Log("heapline.sql")
CALLS_PER_TRANSACTION = 64
_decode_headers = msgspec.msgpack.Decoder(dict[str, str]).decode


@dataclass(slots=True, eq=False)
class PopCall:
    max_messages: int
    max_bytes: int
    visibility: float | None
    holder: bytes | None
    request: bytes | None
    waits: bool
    leases_max: int | None
    began: float
    future: asyncio.Future[Leased] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    rows: list[Any] = field(default_factory=list)
    taken: Place | None = None  # the last message that a claim took, and with it all better ones
    error: HeaplineError | None = None  # why it got nothing; raised unless it waits


class PopQueue:
    def __init__(self, home: Home, tasks: OwnedTasks, poll_interval: float, on_idle: Callable[[], object]) -> None:
        self._home, self._tasks, self._poll_interval, self._on_idle = home, tasks, poll_interval, on_idle
        self._calls: list[PopCall] = []
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def pop(self, call: PopCall, wait: float) -> Leased:
        self._calls.append(call)
        self._woken.set()
        if self._task is None:
            self._task = self._tasks.spawn(self._run())
        timer = asyncio.get_running_loop().call_later(wait, self._stop_waiting, call) if call.waits else None
        try:
            return await call.future
        except asyncio.CancelledError:
            if not call.future.cancelled() and call.future.exception() is None and call.rows:
                self._tasks.spawn(self._give_back(call.rows))  # cancelled after the answer, before it was received
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if call.future.cancelled():
                self._woken.set()

    def close(self, error: HeaplineError) -> None:
        """Refuse all calls. A turn in progress ends by itself, and releases what it has leased."""
        for call in self._calls:
            if not call.future.done():
                call.future.set_exception(error)
        self._woken.set()

    def _stop_waiting(self, call: PopCall) -> None:
        """Answer a call at its next turn, which comes now."""
        call.waits = False
        self._woken.set()

    async def _run(self) -> None:
        wakeups, topic = self._home.shard.wakeups, self._home.name.canonical
        wakeups.add(topic, self._woken)
        try:
            while self._drop_answered():
                self._woken.clear()
                await self._turn()
                if self._drop_answered():
                    await self._sleep()
        finally:
            wakeups.remove(topic, self._woken)
            self._task = None
            self._on_idle()

    def _drop_answered(self) -> bool:
        """Forget calls that were answered or cancelled. Return whether any are left."""
        self._calls = [call for call in self._calls if not call.future.done()]
        return bool(self._calls)

    async def _sleep(self) -> None:
        try:
            async with asyncio.timeout(self._poll_interval):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _turn(self) -> None:
        calls, has_more = list(self._calls), True
        for start in range(0, len(calls), CALLS_PER_TRANSACTION):
            has_more = await self._serve(calls[start : start + CALLS_PER_TRANSACTION], has_more)

    async def _serve(self, calls: list[PopCall], has_more: bool) -> bool:
        """Serve calls in one transaction, then answer them. Return whether there may be more messages."""
        shard, began = self._home.shard, perf_counter()
        epoch = shard.floors.epoch
        try:
            await self._home.flush()
            serve = partial(_lease, home=self._home, calls=calls, has_more=has_more)
            turn, has_more = await shard.in_topic(self._home.name, serve)
        except Exception as error:
            for call in calls:
                if not call.future.done():
                    call.future.set_exception(error)
            if not isinstance(error, HeaplineError):
                log.exception("pop failed", topic=self._home.name.canonical)
            return False
        unwanted: list[Any] = []
        for call in calls:
            if call.taken is not None:
                shard.floors.raise_to(turn.topic.id, turn.layout.turns, call.taken, epoch)
            if call.future.done():
                unwanted += call.rows
            else:
                self._answer(call, turn.topic, began)
        if unwanted:
            await self._give_back(unwanted)  # before the next turn, whose calls are to find them
        return has_more

    def _answer(self, call: PopCall, topic: Topic, began: float) -> None:
        if call.rows:
            counters = self._home.counters
            counters.leased += len(call.rows)
            counters.pop.add(perf_counter() - max(began, call.began))
            self._home.expect(min(row["until"] for row in call.rows))
            call.future.set_result(Leased(topic.name, leased_messages(call.rows), topic.id_suffix))
        elif call.waits:
            return
        elif call.error is not None:
            call.future.set_exception(call.error)
        else:
            call.future.set_result(Leased(topic.name, id_suffix=topic.id_suffix))

    async def _give_back(self, rows: Sequence[Any]) -> None:
        """Release leases that no caller received."""

        async def work(turn: Turn) -> None:
            for slot, (ids, tokens) in by_slot([r["id"] for r in rows], [r["token"] for r in rows]).items():
                hold = statement("hold_leases", lease=f"lease_{slot}")
                held = [Held(*row) for row in await turn.connection.fetch(hold, turn.topic.id, ids, tokens)]
                await settle(
                    turn.connection,
                    turn.layout,
                    slot,
                    turn.topic.id,
                    turn.topic.config,
                    release(held, turn.now),
                    returned_attempts=-1,
                )

        try:
            await self._home.shard.in_topic(self._home.name, work, locked=False)
        except HeaplineError as error:
            log.warning("leases not released; they will expire", error=str(error), count=len(rows))
        self._home.wake()


async def _lease(turn: Turn, home: Home, calls: Sequence[PopCall], has_more: bool) -> tuple[Turn, bool]:
    """Lease messages to these calls, in order. Return whether there may be more."""
    has_more = has_more and not turn.topic.is_paused
    for call in calls:
        call.rows, call.error, call.taken = [], None, None
        if call.future.done():
            continue
        if call.request is not None:
            rows = await turn.connection.fetch(statement("leases_of_request"), turn.topic.id, call.request)
            call.rows = in_order(rows)
        if has_more and not call.rows:
            # If one call finds nothing, those behind it get nothing: a message that arrives now is for the first.
            has_more = await _claim(turn, home, call)
    return turn, has_more


async def _claim(turn: Turn, home: Home, call: PopCall) -> bool:
    """Lease messages to a call. Return whether there may be more."""
    longest = turn.topic.config.lease_max
    if call.visibility is not None and call.visibility > longest:
        text = f"visibility must be at most the topic's lease_max of {longest} seconds, got {call.visibility}"
        call.waits, call.error = False, BadRequest(text)
        return True
    room, call.error = await _room(turn, call)
    if room < 1:
        return True
    floors = home.shard.floors.of(turn.topic.id, turn.layout.turns)
    rows = await turn.connection.fetch(
        turn.layout.claim(),
        turn.topic.id,
        turn.now,
        min(call.max_messages, room),
        call.max_bytes,
        call.holder,
        call.request,
        _visibility_ms(call, turn.topic),
        *zip(*floors, strict=True),
    )
    call.rows = in_order(rows)
    if rows:
        call.taken = Place(*(call.rows[-1][name] for name in Place._fields))
    return bool(rows)


def _visibility_ms(call: PopCall, topic: Topic) -> int:
    config = topic.config
    seconds = config.visibility_default if call.visibility is None else call.visibility
    return max(1, round(seconds * 1000))


async def _room(turn: Turn, call: PopCall) -> tuple[int, ResourceExhausted | None]:
    """Return how many messages the limits leave for a call, and why there are none."""
    room, error = call.max_messages, None
    limit = turn.topic.config.max_inflight
    if limit:
        leased = await turn.connection.fetchval(statement("count_leases"), turn.topic.id)
        room = min(room, limit - leased)
        if room < 1:
            # An empty topic is just empty, however many messages are leased.
            if await turn.connection.fetchval(statement("has_ready"), turn.topic.id, turn.now):
                error = ResourceExhausted(f"max_inflight of topic {turn.topic.name!r}", limit)
            return room, error
    if call.leases_max is not None:
        holder = call.holder or b""
        held = await turn.connection.fetchval(
            statement("count_leases_of_holder"), turn.topic.id, holder, call.leases_max
        )
        room = min(room, call.leases_max - held)
        if room < 1:
            what = f"leases of consumer {holder.decode()!r} on topic {turn.topic.name!r}"
            error = ResourceExhausted(what, call.leases_max)
    return room, error


def in_order(rows: Sequence[Any]) -> list[Any]:
    return sorted(rows, key=lambda row: (row["key"], row["due"], row["id"]))


def leased_messages(rows: Sequence[Any]) -> LeasedMessages:
    names = [None if row["name"] is None else row["name"].decode() for row in rows]
    headers = [None if row["headers"] is None else _decode_headers(row["headers"]) for row in rows]
    ids = [row["id"] for row in rows]
    return LeasedMessages(
        pack(ids),
        pack([row["token"] for row in rows]),
        [row["payload"] for row in rows],
        pack([row["priority"] for row in rows]),
        pack([row["attempts"] for row in rows], "B"),
        pack([unix_ms_of(id) for id in ids]),
        pack([row["until"] for row in rows]),
        keys=names if any(names) else None,
        headers=headers if any(headers) else None,
    )
