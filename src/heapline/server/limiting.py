"""The limits of one caller, on whichever face: calls under way and open streams for each key, leases for each consumer,
bytes for each payload. What is over one is refused with the limit's name, and changes nothing.

Calls and streams are counted from `admitted` to `end`. Leases are counted by the engine, with the leases themselves, so
acks, expiry, restarts and other faces cannot make the count drift. A consumer is a holder on a topic; who pops without
naming one is the holder under his own subject. Pops that wait side by side may together get more than the limit leaves:
`pop_within` gives back what is over before anybody sees it. Of a pop with a name (`request_id`) it gives nothing back,
because another who asked by that name may have it already: those that wait side by side can end up over the limit.
"""

from __future__ import annotations

import hashlib
from typing import Any

from heapline.engine.embedded import EmbeddedBroker
from heapline.engine.requests import check_text
from heapline.errors import ResourceExhausted
from heapline.model import Popped
from heapline.server.auth.limits import Counter, Limiter, Limits
from heapline.server.front import Caller, Visit
from heapline.server.giving_back import give_back_now

STREAMS = frozenset(
    {"PopStream", "EnqueueStream", "ReadLog", "ReadUnits", "PinState", "Replay", "Session", "Subscribe"}
)


class Limiting(Limiter):
    """An `Observer`."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.limits = limits

    def begin(self, visit: Visit) -> None:
        pass

    def admitted(self, visit: Visit) -> None:
        assert visit.caller is not None
        counter = self.streams if visit.call in STREAMS else self.calls
        counter.take(visit.caller.principal.subject)
        visit.notes[Limiting] = counter

    def end(self, visit: Visit, error: BaseException | None) -> None:
        counter: Counter | None = visit.notes.get(Limiting)
        if counter is not None:
            assert visit.caller is not None
            counter.give_back(visit.caller.principal.subject)


async def pop_within(
    broker: EmbeddedBroker, caller: Caller, topic: str, max_messages: int = 1, *, holder: str | None = None,
    request_id: str | None = None, **options: Any,
) -> tuple[str, Popped | None]:  # fmt: skip
    """`pop_columns` for a caller, within the leases that he may have out. For all faces."""
    limit = caller.visit.front.limits.leases_per_consumer
    holder = caller.principal.subject if holder is None else holder
    room = limit - broker.leases_held(topic, holder)
    if request_id is not None:
        request_id = _own_name(caller, request_id)
    if request_id is None or not broker.is_repeat(topic, request_id):  # a repeat brings what is counted already
        if room < 1:
            raise _over(holder, topic, limit)
        max_messages = min(max_messages, room)
    name, popped = await broker.pop_columns(topic, max_messages, holder=holder, request_id=request_id, **options)
    if popped is not None and request_id is None and (over := broker.leases_held(topic, holder) - limit) > 0:
        kept = max(0, len(popped.ids) - over)
        give_back_now(broker, name, popped.without(range(kept)))  # else the next one would see the same ones over
        if not kept:
            raise _over(holder, topic, limit)
        popped = popped.without(range(kept, len(popped.ids)))
    return name, popped


def _own_name(caller: Caller, request_id: str) -> str:
    """Each caller has names of his own: by another's he would get the other's leases."""
    check_text("request_id", request_id)
    return hashlib.blake2b(f"{caller.principal.subject}\0{request_id}".encode(), digest_size=16).hexdigest()


def _over(holder: str, topic: str, limit: int) -> ResourceExhausted:
    return ResourceExhausted(f"leases of consumer {holder!r} on topic {topic!r}", limit)
