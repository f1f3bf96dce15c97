"""`ReplayBroker` of the embedded broker: checks arguments, and asks those who do it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime

from heapline.engine.keeper import TopicKeeper
from heapline.engine.replays import asking, checkpoints
from heapline.engine.replays.delivering import Replaying, Step
from heapline.engine.replays.messages import rows_within
from heapline.engine.replays.ranges import find_ranges
from heapline.engine.replays.reading import Pace, Reading
from heapline.streams import Place, ReplayFilter, ReplayInfo

STEP_BYTES = 2 << 20  # a step over the wire is one message, and most clients take no more than 4 MiB


class ReplayFace(Replaying, TopicKeeper):
    async def replay_steps(self, asked: asking.Request, checkpoint: str | None = None) -> AsyncIterator[Step]:
        runner = self._runner(asked.topic)
        kept = None if checkpoint is None else await checkpoints.find(runner, checkpoint)
        ranges = await find_ranges(runner, asked, kept)
        ends = {p: last for p, (_, last) in ranges.items()}
        yield Step([], {p: first for p, (first, _) in ranges.items()}, ends)
        reading, pace = Reading(runner, asked, ranges, self._clock), Pace(asked.rate, self._clock)
        try:
            while not reading.is_done:
                portion = await reading.next()
                while len(portion):
                    count = min(await pace.room(reading.stay), rows_within(portion, STEP_BYTES))
                    head, portion = portion.split(count)
                    pace.went(count)
                    yield Step([rows.batch for rows in head.rows], head.positions, ends)
                yield Step([], portion.positions, ends)
        finally:
            await reading.close()

    async def keep_replay(self, topic: str, checkpoint: str, positions: Mapping[int, int]) -> None:
        await checkpoints.keep(self._runner(topic), checkpoint, positions)

    async def start_replay(
        self, name: str, topic: str, *, into: str | None = None, start: Place = "earliest", end: Place | None = None,
        partitions: Sequence[int] | None = None, mode: str = "all", where: ReplayFilter | None = None,
        rate: float | None = None, priority: int | None = None, delay: float | None = None,
        deliver_at: datetime | None = None, keep_due: bool = False,
    ) -> ReplayInfo:  # fmt: skip
        self._catalog_or_fail()
        asked = asking.request(topic, start, end, partitions, mode, where, rate)
        return await self._replays.start(name, asked, into, asking.change(priority, delay, deliver_at, keep_due))

    async def get_replay(self, name: str) -> ReplayInfo:
        self._catalog_or_fail()
        return await self._replays.get(name)

    async def list_replays(self) -> list[ReplayInfo]:
        self._catalog_or_fail()
        return await self._replays.listed()

    async def cancel_replay(self, name: str) -> ReplayInfo:
        self._catalog_or_fail()
        return await self._replays.cancel(name)
