"""Replays: the stream of a heap once more, as lines of JSON or into a heap."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Path
from starlette.responses import Response, StreamingResponse

from heapline.engine.replays.asking import request as make_request
from heapline.errors import HeaplineError
from heapline.server.front import Stopping
from heapline.server.http.answers import say
from heapline.server.http.log import NDJSON
from heapline.server.http.openapi import documented
from heapline.server.http.visiting import Here, House
from heapline.server.replaying import cancel_replay, seen_replay, seen_replays, start_checks
from heapline.streams import ReplayInfo
from heapline.wire.json_replays import (
    KeepReplayAsk,
    ReplayReadAsk,
    ReplayStepTold,
    ReplaysTold,
    StartReplayAsk,
    read_positions,
    tell_batch,
)  # fmt: skip
from heapline.wire.json_shapes import Done, tell_error
from heapline.wire.replays import tell_replay

router = APIRouter(prefix="/v1", tags=["replays"])
Name = Annotated[str, Path(max_length=128, description="the replay's name", examples=["monday-again"])]


@documented(
    router, "POST", "/replays:read", asks=ReplayReadAsk, tells=ReplayStepTold, media=NDJSON,
    summary="Read the stream of a heap once more",
)  # fmt: skip
async def read(house: Here) -> Response:
    """Some rows a line (NDJSON), in the order of time, up to what is durable now. The first line has none and tells
    where it begins and ends. If reading ends early, the last line is an error. To go on later, say how far you are by
    `replays:keep`, and name the same checkpoint here."""
    lines = _lines(house)
    first = await anext(lines)  # whatever is refused is refused before the answer begins
    return StreamingResponse(_after(first, lines), media_type=NDJSON)


async def _lines(house: House) -> AsyncIterator[bytes]:
    async with house.asked("Replay", ReplayReadAsk) as (body, caller):
        steps = house.broker.replay_steps(make_request(body.topic, *body.rows()), body.checkpoint)
        async with contextlib.aclosing(steps):  # type: ignore[type-var]
            async for step in steps:
                rows = [row for batch in step.batches for row in tell_batch(batch, body.payload_as)]
                told = ReplayStepTold(
                    topic=body.topic, rows=rows, positions=_texts(step.positions), ends=_texts(step.ends)
                )
                yield msgspec.json.encode(told) + b"\n"
                if house.front.stopping.is_set():
                    raise Stopping
                caller.must_be_valid()


async def _after(first: bytes, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(lines):  # type: ignore[type-var]
        yield first
        try:
            async for line in lines:
                yield line
        except HeaplineError as error:
            yield msgspec.json.encode(tell_error(error)) + b"\n"


def _texts(positions: dict[int, int]) -> dict[str, int]:
    return {str(partition): offset for partition, offset in positions.items()}


@documented(router, "POST", "/replays:keep", asks=KeepReplayAsk, tells=Done, summary="Keep how far a reader is")
async def keep(house: Here) -> Response:
    """Under the name of a checkpoint, durably. What is known of partitions that are not named stays."""
    async with house.asked("KeepReplay", KeepReplayAsk) as (body, _):
        await house.broker.keep_replay(body.topic, body.checkpoint, read_positions(body.positions))
        return say(Done(done=True))


@documented(router, "POST", "/replays", asks=StartReplayAsk, tells=ReplayInfo, summary="Replay into a heap")
async def start(house: Here) -> Response:
    """In the background, each message exactly once, also over restarts. The same request again gets the same replay.
    Needs to administer the source, and to produce into the target."""
    async with house.asked("StartReplay", StartReplayAsk) as (body, caller):
        start_checks(caller, body.topic, body.into, body.name)
        begin, end, partitions, mode, where, rate = body.rows()
        info = await house.broker.start_replay(
            body.name, body.topic, into=body.into, start=begin, end=end, partitions=partitions, mode=mode, where=where,
            rate=rate, priority=body.priority, delay=body.delay, deliver_at=body.deliver_at, keep_due=body.keep_due,
        )  # fmt: skip
        return _say(info)


@documented(router, "GET", "/replays", tells=ReplaysTold, summary="Replays into heaps")
async def list_replays(house: Here) -> Response:
    """Those from heaps that the caller may consume from: running ones, and those that ended of late."""
    async with house.visit("ListReplays") as caller:
        infos = await seen_replays(house.broker, caller)
        return say(ReplaysTold(replays=[tell_replay(info) for info in infos]))


@documented(router, "POST", "/replays/{name}:cancel", tells=ReplayInfo, summary="End a replay into a heap")
async def cancel(name: Name, house: Here) -> Response:
    """What is in the heap stays there. Needs to administer the source."""
    async with house.visit("CancelReplay") as caller:
        return _say(await cancel_replay(house.broker, caller, name))


@documented(router, "GET", "/replays/{name}", tells=ReplayInfo, summary="How far a replay is")
async def get(name: Name, house: Here) -> Response:
    async with house.visit("GetReplay") as caller:
        return _say(await seen_replay(house.broker, caller, name))


def _say(info: ReplayInfo) -> Response:
    return say(tell_replay(info))
