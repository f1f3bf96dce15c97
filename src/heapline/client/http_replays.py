"""Replays over HTTP: the lines of a stream, and the calls about replays into a topic."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from heapline.client.checks import checked_topic
from heapline.client.http_calls import read_error
from heapline.engine.replays.asking import Mark, Request, change, check_name, request
from heapline.engine.replays.delivering import Replaying, Step
from heapline.model import from_ms
from heapline.streams import Place, ReplayFilter, ReplayInfo
from heapline.wire import json_replays as wire
from heapline.wire.json_shapes import Done


class HttpReplays(Replaying):
    """A part of `HttpBroker`."""

    @property
    def calls(self) -> Any:
        raise NotImplementedError

    async def replay_steps(self, asked: Request, checkpoint: str | None = None) -> AsyncIterator[Step]:
        body = wire.ReplayReadAsk(topic=checked_topic(asked.topic), checkpoint=checkpoint, **_rows(asked))
        async for line in self.calls.lines("/v1/replays:read", body=body):
            if line.startswith(b'{"error"'):
                raise read_error(msgspec.json.decode(line))
            told = msgspec.json.decode(line, type=wire.ReplayStepTold)
            positions, ends = wire.read_positions(told.positions), wire.read_positions(told.ends)
            yield Step(wire.read_batches(told.topic, told.rows), positions, ends)

    async def keep_replay(self, topic: str, checkpoint: str, positions: Mapping[int, int]) -> None:
        places = {str(partition): offset for partition, offset in positions.items()}
        body = wire.KeepReplayAsk(topic=checked_topic(topic), checkpoint=checkpoint, positions=places)
        await self.calls("POST", "/v1/replays:keep", Done, body)

    async def start_replay(
        self, name: str, topic: str, *, into: str | None = None, start: Place = "earliest", end: Place | None = None,
        partitions: Sequence[int] | None = None, mode: str = "all", where: ReplayFilter | None = None,
        rate: float | None = None, priority: int | None = None, delay: float | None = None,
        deliver_at: datetime | None = None, keep_due: bool = False,
    ) -> ReplayInfo:  # fmt: skip
        check_name("replay", name)
        rows = request(topic, start, end, partitions, mode, where, rate)
        change(priority, delay, deliver_at, keep_due)
        body = wire.StartReplayAsk(
            name=name, topic=checked_topic(topic), into=None if into is None else checked_topic(into), **_rows(rows),
            priority=priority, delay=delay, deliver_at=deliver_at, keep_due=keep_due,
        )  # fmt: skip
        info: ReplayInfo = await self.calls("POST", "/v1/replays", ReplayInfo, body)
        return info

    async def get_replay(self, name: str) -> ReplayInfo:
        check_name("replay", name)
        info: ReplayInfo = await self.calls("GET", f"/v1/replays/{name}", ReplayInfo)
        return info

    async def list_replays(self) -> list[ReplayInfo]:
        found: wire.ReplaysTold = await self.calls("GET", "/v1/replays", wire.ReplaysTold)
        return found.replays

    async def cancel_replay(self, name: str) -> ReplayInfo:
        check_name("replay", name)
        info: ReplayInfo = await self.calls("POST", f"/v1/replays/{name}:cancel", ReplayInfo)
        return info


def _rows(asked: Request) -> dict[str, Any]:
    where = asked.where
    return {
        "start": _place(asked.start), "end": None if asked.end is None else _place(asked.end),
        "partitions": asked.partitions, "mode": asked.mode, "rate": asked.rate,
        "where": None if where is None else wire.ReplayWhere(
            priority_min=where.priority_min, priority_max=where.priority_max, key=where.key, headers=where.headers
        ),
    }  # fmt: skip


def _place(mark: Mark) -> Any:
    if mark.wall_ms is not None:
        return wire.tell_place(from_ms(mark.wall_ms))
    if mark.offsets is not None:
        return wire.tell_place(mark.offsets)
    return mark.offset if mark.end_of_log is None else mark.end_of_log
