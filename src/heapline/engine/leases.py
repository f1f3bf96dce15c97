"""Handlers of pops, and of calls on leases."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache

from heapline.contract import leases
from heapline.contract.call import Context
from heapline.contract.check import seconds_to_ms
from heapline.contract.columns import pack, unpack
from heapline.contract.errors import BadRequest
from heapline.core.leases import DEADLINE
from heapline.core.now import Now
from heapline.core.partition import Partition
from heapline.engine import lookup
from heapline.engine.delivery import PopCall
from heapline.engine.handlers import handles
from heapline.engine.runner import TopicRunner
from heapline.engine.topics import TopicKeeper

Decide = Callable[[Partition, list[int], list[int], Now], Sequence[int]]


@handles(leases.Pop)
def pop(broker: TopicKeeper, command: leases.Pop, context: Context) -> Awaitable[leases.Leased]:
    """Lease messages for the principal: with its own request ids, and within its lease limit."""
    runner = broker.runner(command.topic)
    config = runner.loaded.topic.config
    seconds = command.visibility
    if seconds is None:
        seconds = config.visibility_default
    elif seconds > config.lease_max:
        raise BadRequest(
            f"visibility must be at most the topic's lease_max of {config.lease_max} seconds, got {seconds}"
        )
    holder, request_id = command.holder, command.request_id
    if context.principal is not None:
        holder = holder or context.principal
        if request_id is not None:
            request_id = own_request_id(context.principal, request_id)
    call = PopCall(
        runner.pop_future(request_id),
        command.max_messages,
        command.max_bytes,
        lease_ms(seconds),
        holder,
        request_id,
        command.wait > 0,
        context.leases_max,
        command.max_messages,
    )
    return runner.pop(call, command.wait)


@lru_cache(1024)
def lease_ms(seconds: float) -> int:
    """Return the length of a lease in ms. Cached, because rounding a float takes four times as long."""
    return round(seconds * 1000)


def own_request_id(principal: str, request_id: str) -> str:
    """Return an id private to the principal: with another's request id it would get that principal's leases."""
    return hashlib.blake2b(f"{principal}\0{request_id}".encode(), digest_size=16).hexdigest()


@handles(leases.Ack)
def ack(broker: TopicKeeper, command: leases.Ack, context: Context) -> Awaitable[leases.Settled]:
    return broker.runner(command.topic).ack(command.leases)


@handles(leases.Nack)
def nack(broker: TopicKeeper, command: leases.Nack, context: Context) -> Awaitable[leases.Settled]:
    runner = broker.runner(command.topic)
    wait = None if command.backoff is None else seconds_to_ms(command.backoff)

    def decide(p: Partition, ids: list[int], tokens: list[int], now: Now) -> Sequence[int]:
        return runner.loaded.emit_decision(p, p.decide_nack(ids, tokens, now, wait, command.reason), now)

    return _settle(runner, command.leases, decide)


@handles(leases.Release)
def release(broker: TopicKeeper, command: leases.Release, context: Context) -> Awaitable[leases.Settled]:
    runner = broker.runner(command.topic)

    def decide(p: Partition, ids: list[int], tokens: list[int], now: Now) -> Sequence[int]:
        return runner.loaded.emit_decision(
            p, p.decide_release(ids, tokens, now, runner.loaded.topic.take_seq(len(ids))), now
        )

    return _settle(runner, command.leases, decide)


@handles(leases.Bury)
def bury(broker: TopicKeeper, command: leases.Bury, context: Context) -> Awaitable[leases.Settled]:
    runner = broker.runner(command.topic)

    def decide(p: Partition, ids: list[int], tokens: list[int], now: Now) -> Sequence[int]:
        return runner.loaded.emit_decision(p, p.decide_bury(ids, tokens, now, command.reason), now)

    return _settle(runner, command.leases, decide)


@handles(leases.Extend)
async def extend(broker: TopicKeeper, command: leases.Extend, context: Context) -> leases.Extended:
    runner = broker.runner(command.topic)
    extend_ms = round(command.seconds * 1000)
    deadlines: dict[tuple[int, int], int] = {}  # as decided: later state in memory may not be durable

    def decide(p: Partition, ids: list[int], tokens: list[int], now: Now) -> Sequence[int]:
        lost = runner.loaded.emit_decision(p, p.decide_extend(ids, tokens, now, extend_ms), now)
        for id, token in zip(ids, tokens, strict=True):
            if p.entries.leases.holds(id, token):
                deadlines[id, token] = p.entries.leases.by_id[id][DEADLINE]
        return lost

    settled = await _settle(runner, command.leases, decide)
    pairs = zip(unpack(command.leases.ids), unpack(command.leases.tokens), strict=True)
    return leases.Extended(pack([deadlines.get(pair, -1) for pair in pairs]), settled.lost)


async def _settle(runner: TopicRunner, keys: leases.LeaseKeys, decide: Decide) -> leases.Settled:
    """Run a decision about leases in each partition, in one turn."""
    ids, tokens = unpack(keys.ids), unpack(keys.tokens)
    if not ids:
        return leases.Settled()

    def run(now: Now) -> list[int]:
        lost: list[int] = []
        for partition, part_ids, part_tokens in runner.loaded.topic.by_partition(ids, tokens):
            lost += decide(partition, part_ids, part_tokens, now)
        return lost

    return leases.Settled(await runner.call(run))


@handles(leases.GetLease)
async def get_lease(broker: TopicKeeper, command: leases.GetLease, context: Context) -> leases.LeaseInfo:
    runner = broker.runner(command.topic)
    found = await lookup.lease_of(runner, runner.loaded.topic.find_id(command.message_id))
    if found is None:
        return leases.LeaseInfo()
    token, holder = found
    is_own = context.principal is None or holder == context.principal
    return leases.LeaseInfo(token if is_own else None, holder)
