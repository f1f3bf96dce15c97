"""The gRPC methods about replays: from a request to the contract's call and back.

Whoever starts a replay into a topic administers its source and may produce into its target; whoever may consume from
the source may look at it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from heapline.engine.embedded import EmbeddedBroker
from heapline.engine.replays.asking import request as make_request
from heapline.errors import BadRequest, ReplayNotFound
from heapline.server.auth.principal import Action
from heapline.server.front import Caller, Front, Stopping
from heapline.streams import Place, ReplayInfo
from heapline.wire import replays as wire
from heapline.wire.schema import pb
from heapline.wire.shapes import given, moment
from heapline.wire.stream_rows import pack_batch, unpack_place


class ReplayMethods:
    _broker: EmbeddedBroker
    _front: Front

    async def Replay(self, request: Any, caller: Caller) -> AsyncIterator[Any]:
        asked = make_request(request.topic, *_rows(request))
        steps = self._broker.replay_steps(asked, given(request, "checkpoint"))
        async with contextlib.aclosing(steps):  # type: ignore[type-var]  # it lets go of the journal
            async for step in steps:
                if self._front.stopping.is_set():
                    raise Stopping
                batches = map(pack_batch, step.batches)
                yield pb.ReplayStep(topic=request.topic, batches=batches, positions=step.positions, ends=step.ends)

    async def KeepReplay(self, request: Any, caller: Caller) -> Any:
        await self._broker.keep_replay(request.topic, request.checkpoint, dict(request.positions))
        return pb.Done()

    async def StartReplay(self, request: Any, caller: Caller) -> Any:
        into = given(request, "into")
        start_checks(caller, request.topic, into, request.name)
        start, end, partitions, mode, where, rate = _rows(request)
        info = await self._broker.start_replay(
            request.name, request.topic, into=into, start=start, end=end, partitions=partitions, mode=mode,
            where=where, rate=rate, priority=given(request, "priority"), delay=given(request, "delay"),
            deliver_at=moment(request, "deliver_at_us"), keep_due=request.keep_due,
        )  # fmt: skip
        return wire.pack_replay(info)

    async def GetReplay(self, request: Any, caller: Caller) -> Any:
        return wire.pack_replay(await seen_replay(self._broker, caller, request.name))

    async def ListReplays(self, request: Any, caller: Caller) -> Any:
        return wire.pack_replays(await seen_replays(self._broker, caller))

    async def CancelReplay(self, request: Any, caller: Caller) -> Any:
        return wire.pack_replay(await cancel_replay(self._broker, caller, request.name))


# -- for both faces ----------------------------------------------------------------------------------------------------


def start_checks(caller: Caller, topic: str, into: str | None, name: str) -> None:
    """That he administers the source was checked at the door."""
    caller.must(Action.PRODUCE, topic if into is None else into)
    caller.tell(about=f"replay {name[:128]} into {(topic if into is None else into)[:300]}")


async def seen_replay(broker: EmbeddedBroker, caller: Caller, name: str) -> ReplayInfo:
    info = await broker.get_replay(name)
    if not caller.may(Action.CONSUME, info.source):
        raise ReplayNotFound(name)  # which topics there are is not for everybody
    return info


async def seen_replays(broker: EmbeddedBroker, caller: Caller) -> list[ReplayInfo]:
    return [info for info in await broker.list_replays() if caller.may(Action.CONSUME, info.source)]


async def cancel_replay(broker: EmbeddedBroker, caller: Caller, name: str) -> ReplayInfo:
    info = await seen_replay(broker, caller, name)
    caller.visit.topic = info.source
    caller.tell(about=f"replay {info.name} into {info.into}")
    caller.must(Action.ADMIN, info.source)
    return await broker.cancel_replay(name)


def _rows(request: Any) -> tuple[Any, ...]:
    """Start, end, partitions, mode, filter and rate."""
    start = _place(request, "start")
    end = _place(request, "end")
    mode = request.mode or "all"
    return (
        "earliest" if start is None else start,
        end,
        list(request.partitions) or None,
        mode,
        wire.unpack_filter(request),
        given(request, "rate"),
    )


def _place(request: Any, field: str) -> Place | None:
    """None: it was not given. One that is there and says nothing is a mistake, and not the whole stream."""
    place = unpack_place(request, field)
    if place is None and request.HasField(field):
        raise BadRequest(f"{field} is one of edge, offset, offsets and at_us: none is given")
    return place
