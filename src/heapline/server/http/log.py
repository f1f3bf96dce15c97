"""The log of a heap: from where to where it can be read, and its frames as lines of JSON."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response, StreamingResponse

from heapline.errors import HeaplineError
from heapline.server.front import Stopping
from heapline.server.http.answers import say
from heapline.server.http.openapi import documented
from heapline.server.http.queries import LogQuery, OnTopic
from heapline.server.http.visiting import Here, House
from heapline.wire.json_log import FrameTold, tell_frame
from heapline.wire.json_shapes import OffsetsTold, PartitionOffsets, tell_error

router = APIRouter(prefix="/v1", tags=["the log"])
NDJSON = "application/x-ndjson"


@documented(router, "GET", "/offsets", tells=OffsetsTold, summary="What of the log can be read")
async def offsets(query: Annotated[OnTopic, Query()], house: Here) -> Response:
    async with house.visit("Offsets", query.topic):
        found = await house.broker.offsets(query.topic)
        partitions = [PartitionOffsets(partition=p, start=s, end=e) for p, (s, e) in sorted(found.items())]
        return say(OffsetsTold(topic=query.topic, partitions=partitions))


@documented(router, "GET", "/log", tells=FrameTold, media=NDJSON, summary="Read the log of a partition")
async def read_log(query: Annotated[LogQuery, Query()], house: Here) -> Response:
    """One frame a line (NDJSON), up to what is durable now. If reading ends early, the last line is an error."""
    lines = _lines(house, query)
    first = await anext(lines)  # whatever is refused is refused before the answer begins
    return StreamingResponse(_after(first, lines), media_type=NDJSON)


async def _lines(house: House, query: LogQuery) -> AsyncIterator[bytes]:
    """An empty line of bytes first, when the log could be opened; then the frames."""
    async with house.visit("ReadLog", query.topic) as caller:
        frames = house.broker.read_log(query.topic, query.partition, query.start, query.end)
        async with contextlib.aclosing(frames):  # type: ignore[type-var]
            frame: Any = await anext(frames, None)
            yield b""
            while frame is not None:
                yield msgspec.json.encode(tell_frame(frame)) + b"\n"
                if house.front.stopping.is_set():
                    raise Stopping
                caller.must_be_valid()
                frame = await anext(frames, None)


async def _after(first: bytes, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(lines):  # type: ignore[type-var]
        yield first
        try:
            async for line in lines:
                yield line
        except HeaplineError as error:
            yield msgspec.json.encode(tell_error(error)) + b"\n"
