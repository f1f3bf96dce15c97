"""Leases that were taken for somebody who has gone: back to the heap at once, whoever else ends meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from heapline.engine.embedded import EmbeddedBroker
from heapline.model import LeaseRef, Popped

_RELEASES: set[asyncio.Task[None]] = set()


def give_back(broker: EmbeddedBroker, topic: str, popped: Popped) -> None:
    """What was popped and not handed over."""
    give_back_leases(broker, topic, popped.ids, popped.tokens)


def give_back_leases(broker: EmbeddedBroker, topic: str, ids: Sequence[int], tokens: Sequence[int]) -> None:
    refs = [LeaseRef(topic, id, token) for id, token in zip(ids, tokens, strict=True)]
    task = asyncio.ensure_future(broker.release(refs))
    _RELEASES.add(task)  # it outlives the call
    task.add_done_callback(_forget)


def give_back_now(broker: EmbeddedBroker, topic: str, popped: Popped) -> None:
    """The same, decided in this very step; later only where the topic is just being loaded."""
    released = broker.release_now(topic, popped.ids, popped.tokens)
    if released.done() and released.exception() is not None:
        give_back(broker, topic, popped)
    else:
        released.add_done_callback(_look_at)


def give_back_result(broker: EmbeddedBroker, pop: asyncio.Future[tuple[str, Popped | None]]) -> None:
    """What a pop brought that has ended, one way or another."""
    if not pop.cancelled() and pop.exception() is None:
        name, popped = pop.result()
        if popped is not None:
            give_back(broker, name, popped)


def _forget(task: asyncio.Task[None]) -> None:
    _RELEASES.discard(task)
    _look_at(task)


def _look_at(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()  # a broker that closes meanwhile: the leases run out by themselves
