"""Lease messages to pops, in the transaction of their turn: the best ones, or those of the ready queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from heapline.contract.columns import pack
from heapline.contract.errors import BadRequest, HeaplineError, ResourceExhausted
from heapline.contract.leases import Leased, LeasedMessages
from heapline.core.ids import unix_ms_of
from heapline.sql.events import record
from heapline.sql.home import Home
from heapline.sql.layout import Place
from heapline.sql.ready_queue import depth_of
from heapline.sql.shard import Topic, Turn
from heapline.sql.statements import statement

_decode_headers = msgspec.msgpack.Decoder(dict[str, str]).decode
TRIES = 4  # of a call to take from the ready queue, each with other entries


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
    entries: list[Place] = field(default_factory=list)  # of the ready queue, for this call
    is_taking: bool = False  # a transaction is taking its entries
    tries_left: int = TRIES  # to take from the ready queue; then it leases the best messages
    taken: Place | None = None  # the last message that a claim took, and with it all better ones
    error: HeaplineError | None = None  # why it got nothing; raised unless it waits


Claim = Callable[[Turn, Home, PopCall], Awaitable[bool]]


async def lease(
    turn: Turn, home: Home, calls: Sequence[PopCall], claim: Claim, has_more: bool = True
) -> tuple[Turn, bool]:
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
            has_more = await claim(turn, home, call)
    return turn, has_more


async def claim_best(turn: Turn, home: Home, call: PopCall) -> bool:
    """Lease the best messages to a call. Return whether there may be more."""
    room = await _room(turn, call)
    if room < 1:
        return True
    await _grant(turn, home, call, room, turn.layout.claim())
    if call.rows:
        call.taken = place_of(call.rows[-1])
    return bool(call.rows)


async def take_entries(turn: Turn, home: Home, call: PopCall) -> bool:
    """Lease the messages of a call's entries to it, those that are still ready. The other calls have other entries."""
    depth, entries = depth_of(turn.topic.config), call.entries
    if entries and depth:
        room = await _room(turn, call)
        if room > 0:
            ids = [place.id for place in entries]
            await _grant(turn, home, call, room, turn.layout.take(), ids, depth + 1, *max(entries))
    return True


async def _grant(turn: Turn, home: Home, call: PopCall, room: int, claim: str, *values: Any) -> None:
    """Lease messages for a call with a statement, which may need further values."""
    floors, visibility = home.shard.floors.of(turn.topic.id, turn.layout.turns), _visibility_ms(call, turn.topic)
    rows = await turn.connection.fetch(
        claim,
        turn.topic.id,
        turn.now,
        min(call.max_messages, room),
        call.max_bytes,
        call.holder,
        call.request,
        visibility,
        *zip(*floors, strict=True),
        *values,
    )
    call.rows = in_order(rows)
    if turn.topic.config.retention and rows:
        deadline, attempts = rows[0]["until"], [row["attempts"] for row in call.rows]
        at, ids = deadline - visibility, [row["id"] for row in call.rows]
        columns = {"attempts": attempts, "deadline": deadline, "holder": call.holder}
        await record(turn.connection, turn.topic.id, turn.topic.config, "leased", at, ids, **columns)


def exclusive_names(call: PopCall) -> list[str]:
    """Return what no other pop of the topic may have at the same time: a repeat would lease again."""
    names = [] if call.request is None else [f"request {call.request.hex()}"]
    return names if call.leases_max is None else [*names, f"holder {(call.holder or b'').hex()}"]


def _visibility_ms(call: PopCall, topic: Topic) -> int:
    config = topic.config
    seconds = config.visibility_default if call.visibility is None else call.visibility
    return max(1, round(seconds * 1000))


async def _room(turn: Turn, call: PopCall) -> int:
    """Return how many messages the limits leave for a call. If there are none, its error says why."""
    longest = turn.topic.config.lease_max
    if call.visibility is not None and call.visibility > longest:
        text = f"visibility must be at most the topic's lease_max of {longest} seconds, got {call.visibility}"
        call.waits, call.error = False, BadRequest(text)
        return 0
    room = call.max_messages
    limit = turn.topic.config.max_inflight
    if limit:
        leased: int = await turn.connection.fetchval(statement("count_leases"), turn.topic.id)
        room = min(room, limit - leased)
        if room < 1:
            # An empty topic is just empty, however many messages are leased.
            if await turn.connection.fetchval(statement("has_ready"), turn.topic.id, turn.now):
                call.error = ResourceExhausted(f"max_inflight of topic {turn.topic.name!r}", limit)
            return room
    if call.leases_max is not None:
        holder = call.holder or b""
        held: int = await turn.connection.fetchval(
            statement("count_leases_of_holder"), turn.topic.id, holder, call.leases_max
        )
        room = min(room, call.leases_max - held)
        if room < 1:
            what = f"leases of consumer {holder.decode()!r} on topic {turn.topic.name!r}"
            call.error = ResourceExhausted(what, call.leases_max)
    return room


def place_of(row: Any) -> Place:
    return Place(row["key"], row["due"], row["id"])


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
