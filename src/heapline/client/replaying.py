"""Replays over gRPC: the stream of steps, and the calls about replays into a topic."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from heapline.client.checks import checked_topic
from heapline.engine.replays.asking import Change, Mark, Request, change, check_name, request
from heapline.engine.replays.delivering import Replaying, Step
from heapline.streams import Place, ReplayFilter, ReplayInfo
from heapline.wire import replays as wire
from heapline.wire.columns import to_us
from heapline.wire.schema import pb
from heapline.wire.stream_rows import pack_place, unpack_batch


class WireReplays(Replaying):
    """A part of `WireBroker`."""

    @property
    def calls(self) -> Any:
        raise NotImplementedError

    async def replay_steps(self, asked: Request, checkpoint: str | None = None) -> AsyncIterator[Step]:
        message = pb.ReplayRequest(topic=checked_topic(asked.topic), checkpoint=checkpoint, **_rows(asked))
        async for step in self.calls.stream("Replay", message):
            batches = [unpack_batch(None, step.topic, columns) for columns in step.batches]
            yield Step(batches, dict(step.positions), dict(step.ends))

    async def keep_replay(self, topic: str, checkpoint: str, positions: Mapping[int, int]) -> None:
        message = pb.KeepReplayRequest(topic=checked_topic(topic), checkpoint=checkpoint, positions=dict(positions))
        await self.calls("KeepReplay", message)

    async def start_replay(
        self, name: str, topic: str, *, into: str | None = None, start: Place = "earliest", end: Place | None = None,
        partitions: Sequence[int] | None = None, mode: str = "all", where: ReplayFilter | None = None,
        rate: float | None = None, priority: int | None = None, delay: float | None = None,
        deliver_at: datetime | None = None, keep_due: bool = False,
    ) -> ReplayInfo:  # fmt: skip
        check_name("replay", name)
        rows = request(topic, start, end, partitions, mode, where, rate)
        given: Change = change(priority, delay, deliver_at, keep_due)
        message = pb.StartReplayRequest(
            topic=checked_topic(topic), name=name, into=None if into is None else checked_topic(into), **_rows(rows),
            priority=given.priority, delay=given.delay, keep_due=given.keep_due,
            deliver_at_us=None if deliver_at is None else to_us(deliver_at),
        )  # fmt: skip
        return wire.unpack_replay(await self.calls("StartReplay", message))

    async def get_replay(self, name: str) -> ReplayInfo:
        check_name("replay", name)
        return wire.unpack_replay(await self.calls("GetReplay", pb.ReplayName(name=name)))

    async def list_replays(self) -> list[ReplayInfo]:
        return wire.unpack_replays(await self.calls("ListReplays", pb.Nothing()))

    async def cancel_replay(self, name: str) -> ReplayInfo:
        check_name("replay", name)
        return wire.unpack_replay(await self.calls("CancelReplay", pb.ReplayName(name=name)))


def _rows(asked: Request) -> dict[str, Any]:
    return {
        "start": _place(asked.start), "end": None if asked.end is None else _place(asked.end),
        "partitions": asked.partitions, "mode": asked.mode, "where": wire.pack_filter(asked.where), "rate": asked.rate,
    }  # fmt: skip


def _place(mark: Mark) -> Any:
    if mark.wall_ms is not None:
        return pb.StreamPlace(at_us=mark.wall_ms * 1000)
    place = mark.end_of_log if mark.end_of_log is not None else mark.offset if mark.offsets is None else mark.offsets
    return pack_place(place)  # type: ignore[arg-type]  # exactly one is given
