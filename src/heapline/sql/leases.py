"""Handlers of pops, and of calls on leases."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from heapline.contract import leases
from heapline.contract.call import Context
from heapline.contract.check import seconds_to_ms
from heapline.contract.columns import pack, unpack
from heapline.contract.errors import TopicNotFound
from heapline.sql.claims import PopCall
from heapline.sql.handlers import handles
from heapline.sql.home import Home
from heapline.sql.layout import LONG_LEASES, ack_in, in_slots
from heapline.sql.node import Node
from heapline.sql.retries import Held, Outcomes, bury, release, retry
from heapline.sql.settlement import acked_before, count, hold, settle
from heapline.sql.shard import Turn, read_config
from heapline.sql.statements import statement

Decide = Callable[[Sequence[Held], Turn], Outcomes]
_draw = np.random.default_rng().random


@handles(leases.Pop)
async def pop(node: Node, command: leases.Pop, context: Context) -> leases.Leased:
    """Lease messages for the principal: with its own request ids, and within its lease limit."""
    home = node.home(command.topic)
    holder, request_id = command.holder, command.request_id
    if context.principal is not None:
        holder = holder or context.principal
        if request_id is not None:
            request_id = own_request_id(context.principal, request_id)
    call = PopCall(
        command.max_messages,
        command.max_bytes,
        command.visibility,
        None if holder is None else holder.encode(),
        None if request_id is None else request_id.encode(),
        command.wait > 0,
        context.leases_max,
        perf_counter(),
    )
    return await node.pops(home).pop(call, command.wait)


def own_request_id(principal: str, request_id: str) -> str:
    """Return an id private to the principal: with another's request id it would get that principal's leases."""
    return hashlib.blake2b(f"{principal}\0{request_id}".encode(), digest_size=16).hexdigest()


@handles(leases.Ack)
async def ack(node: Node, command: leases.Ack, context: Context) -> leases.Settled:
    home = node.home(command.topic)
    ids, tokens = unpack(command.leases.ids), unpack(command.leases.tokens)
    lost: list[int] = []
    topic: Any = None
    async with home.shard.connection() as connection:

        async def end(slot: int, some: list[int], their_tokens: list[int]) -> set[int]:
            nonlocal topic
            topic = await connection.fetchrow(ack_in(slot), *home.name, some, their_tokens)
            if topic is None:
                raise TopicNotFound(home.name.canonical)
            acked = set(topic["acked"])
            home.counters.acked += len(acked)
            if slot == LONG_LEASES:
                acked |= await acked_before(connection, topic["id"], some, their_tokens)
                lost.extend(id for id in some if id not in acked)
            return acked

        await in_slots(ids, tokens, end)
        if not ids:  # an ack of nothing still needs its topic
            await end(0, [], [])
    if read_config(topic["config"])[0].max_inflight:
        home.wake()
    return leases.Settled(lost)


@handles(leases.Nack)
async def nack(node: Node, command: leases.Nack, context: Context) -> leases.Settled:
    wait = None if command.backoff is None else seconds_to_ms(command.backoff)
    home = node.home(command.topic)

    def decide(held: Sequence[Held], turn: Turn) -> Outcomes:
        return retry(held, turn.topic.config, turn.now, wait, _draw)

    def record(outcomes: Outcomes) -> None:
        home.counters.nacked += len(outcomes.ready) + len(outcomes.delayed)

    cause = command.reason or "nacked"
    return await _end(home, command.leases, decide, record, reason=command.reason, cause=cause, kind="nacked")


@handles(leases.Release)
async def handle_release(node: Node, command: leases.Release, context: Context) -> leases.Settled:
    home = node.home(command.topic)
    return await _end(home, command.leases, lambda held, turn: release(held, turn.now), attempts=-1)


@handles(leases.Bury)
async def handle_bury(node: Node, command: leases.Bury, context: Context) -> leases.Settled:
    home = node.home(command.topic)
    return await _end(home, command.leases, lambda held, turn: bury(held), cause=command.reason or "buried")


@handles(leases.Extend)
async def extend(node: Node, command: leases.Extend, context: Context) -> leases.Extended:
    home = node.home(command.topic)
    ids, tokens = unpack(command.leases.ids), unpack(command.leases.tokens)
    deadlines: dict[tuple[int, int], int] = {}

    async def work(turn: Turn) -> None:
        deadlines.clear()
        until, longest = turn.now + round(command.seconds * 1000), round(turn.topic.config.lease_max * 1000)

        async def extend_in(slot: int, some: list[int], their_tokens: list[int]) -> set[int]:
            update = statement("extend", lease=f"lease_{slot}")
            rows = await turn.connection.fetch(update, turn.topic.id, some, their_tokens, until, longest)
            token_of = dict(zip(some, their_tokens, strict=True))
            deadlines.update({(row["id"], token_of[row["id"]]): row["until"] for row in rows})
            return {row["id"] for row in rows}

        await in_slots(ids, tokens, extend_in)

    await home.shard.in_topic(home.name, work, locked=False)
    ends = [deadlines.get(pair, -1) for pair in zip(ids, tokens, strict=True)]
    return leases.Extended(pack(ends), [id for id, end in zip(ids, ends, strict=True) if end < 0])


@handles(leases.GetLease)
async def get_lease(node: Node, command: leases.GetLease, context: Context) -> leases.LeaseInfo:
    home = node.home(command.topic)
    topic = (await home.shard.read_topic(home.name)).topic
    async with home.shard.connection() as connection:
        row = await connection.fetchrow(statement("lease_of"), topic.id, topic.find_id(command.message_id))
    if row is None:
        return leases.LeaseInfo()
    holder = None if row["holder"] is None else row["holder"].decode()
    is_own = context.principal is None or holder == context.principal
    return leases.LeaseInfo(row["token"] if is_own else None, holder)


async def _end(
    home: Home,
    keys: leases.LeaseKeys,
    decide: Decide,
    record: Callable[[Outcomes], None] = lambda outcomes: None,
    *,
    reason: str | None = None,
    cause: str = "",
    kind: str = "released",
    attempts: int = 0,
) -> leases.Settled:
    """End leases as `decide` says; return those that were not held."""
    ids, tokens = unpack(keys.ids), unpack(keys.tokens)

    async def work(turn: Turn) -> tuple[list[int], list[Outcomes]]:
        lost: list[int] = []
        ended: list[Outcomes] = []

        async def end(slot: int, some: list[int], their_tokens: list[int]) -> set[int]:
            held = await hold(turn.connection, slot, turn.topic.id, some, their_tokens)
            outcomes = decide(held, turn)
            await settle(
                turn.connection,
                turn.layout,
                slot,
                turn.topic.id,
                turn.topic.config,
                outcomes,
                reason=reason,
                cause=cause,
                kind=kind,
                returned_attempts=attempts,
            )
            ended.append(outcomes)
            found = {one.id for one in held}
            if slot == LONG_LEASES:
                lost.extend(id for id in some if id not in found)
            return found

        await in_slots(ids, tokens, end)
        return lost, ended

    lost, ended = await home.shard.in_topic(home.name, work, locked=False)
    for outcomes in ended:
        record(outcomes)
        count(home.counters, outcomes)
        if outcomes.wakes:
            home.expect(min(outcomes.wakes))
    home.wake()
    return leases.Settled(lost)
