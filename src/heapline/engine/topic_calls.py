"""The calls on a topic as a whole, of the embedded broker: purge, pause, throttle, snapshot, stats.

Making, changing and deleting topics is the keeper's (keeper.py).
"""

from __future__ import annotations

import contextlib
from datetime import datetime

from heapline.core.events import Paused, Resumed, Throttled
from heapline.engine.columns import check_moment, to_ms
from heapline.engine.keeper import TopicKeeper
from heapline.engine.reporting import topic_stats
from heapline.engine.requests import check_int, check_reason
from heapline.engine.runner import TopicRunner
from heapline.errors import BadRequest
from heapline.model import Now, TopicStats

GROWING_SEGMENTS = 4  # at the journal's end: those that may still be filled


class TopicCalls(TopicKeeper):
    """Mixed into the embedded broker."""

    async def purge(self, topic: str) -> int:
        runner = self._runner(topic)

        def decide(now: Now) -> int:
            count = 0
            for partition in runner.topic.partitions:
                event = partition.decide_purge(now)
                if event is not None:
                    count += event.count
                    runner.emit(partition, event, now)
            return count

        return await runner.call(decide)

    async def pause_topic(self, topic: str, until: datetime | None = None) -> None:
        runner = self._runner(topic)
        if until is not None:
            check_moment("until", until)
        moment = None if until is None else to_ms(until)
        await runner.call(lambda now: runner.emit(runner.topic.partitions[0], Paused(moment), now))

    async def resume_topic(self, topic: str) -> None:
        runner = self._runner(topic)

        def decide(now: Now) -> None:
            if runner.topic.paused:
                runner.emit(runner.topic.partitions[0], Resumed(), now)

        await runner.call(decide)

    async def set_partition_throttled(
        self, topic: str, partition: int, throttled: bool, reason: str | None = None
    ) -> None:
        runner = self._runner(topic)
        if type(throttled) is not bool:
            raise BadRequest(f"throttled is True or False, not {throttled!r}")
        check_reason(reason)

        def decide(now: Now) -> None:
            check_int("partition", partition, 0, len(runner.topic.partitions) - 1)
            chosen = runner.topic.partitions[partition]
            wanted = (reason or "") if throttled else None
            if chosen.throttled != wanted:
                runner.emit(chosen, Throttled(throttled, wanted or ""), now)

        await runner.call(decide)

    async def snapshot(self, topic: str) -> None:
        await self._runner(topic).upkeep.snapshot()

    async def stats(self, topic: str) -> TopicStats:
        runner = self._runner(topic)
        usage = await self._io_or_fail().run(self._usage, runner)
        return await runner.call(lambda now: topic_stats(runner, usage, now))

    def _usage(self, runner: TopicRunner) -> tuple[int, int]:
        """Bytes and number of segments. One that has a few behind it no longer grows: its size is asked for once."""
        directory, known, sizes = runner.loader.directory, runner.segment_sizes, dict[str, int]()
        names = sorted(name for name in self._disk.listdir(directory) if name.endswith(".seg"))
        for name in names:
            if name not in known or name in names[-GROWING_SEGMENTS:]:
                with contextlib.suppress(FileNotFoundError):  # reclaimed just now
                    file = self._disk.open(f"{directory}/{name}")
                    sizes[name] = file.size()
                    file.close()
            else:
                sizes[name] = known[name]
        runner.segment_sizes = sizes
        return sum(sizes.values()), len(sizes)
