"""Background work of partitions: merging sorted runs, and dropping stale entries and expired keys.

It has no visible effect, and no caller waits for it. So it runs in steps of its own, each of a bounded number of rows,
while no turn is planned. Under steady load a turn is always planned. Then a turn does the work itself, before enough
rows or turns have left work behind to make pops slower.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from heapline.core.now import Now
from heapline.engine.loaded_topic import RunningTopic
from heapline.engine.timers import QUANTUM_ROWS
from heapline.engine.topic import Topic
from heapline.logs import Log

log = Log("heapline.engine")
STEP_ROWS = 16_384  # of one step; about a millisecond
LOOK_ROWS = 1024  # what a partition costs in which there is little to do
TURN_ROWS = 65_536  # for one partition, if a turn has to do the work
BEHIND_ROWS_MAX = 8192  # enqueued since the last work
BEHIND_TURNS_MAX = 64
BEHIND_PARTITIONS_MAX = 64  # that one turn does
FIRED_ROWS = 4  # rows merged per fired row while more are due: each new row is merged about three times


class PartitionUpkeep:
    def __init__(self, runner: RunningTopic, is_turn_planned: Callable[[], bool]) -> None:
        self._runner, self._is_turn_planned = runner, is_turn_planned
        self._loop = asyncio.get_running_loop()
        self._topic: Topic | None = None
        self._behind: dict[int, None] = {}  # its partitions with work to do, the longest first
        self._rows = self._turns = 0  # since the last work
        self._is_planned = False

    def after_turn(self, now: Now, enqueued: int, fired: int) -> None:
        """Take note of the partitions that a turn has changed. Do their work now if it cannot wait."""
        loaded = self._runner.loaded
        if loaded.topic is not self._topic:  # loaded again, perhaps without a growth that failed
            self._topic = loaded.topic
            self._behind.clear()
        partitions, changed = loaded.topic.partitions, loaded.topic.changed
        if loaded.firing.wakes.line:  # many rows fire in turns that follow each other: pay for each turn's rows in it
            budget = min(TURN_ROWS, FIRED_ROWS * (fired + QUANTUM_ROWS))
            for number in changed:
                partitions[number].maintain(now, budget)
            return
        for number in changed:
            if partitions[number].has_upkeep(now):
                self._behind[number] = None
        if not self._behind:
            return
        self._rows += enqueued
        self._turns += 1
        if self._rows >= BEHIND_ROWS_MAX or self._turns >= BEHIND_TURNS_MAX:
            self._rows = self._turns = 0
            for number in list(self._behind)[:BEHIND_PARTITIONS_MAX]:
                self._maintain(number, now, TURN_ROWS)
        self._plan()

    def _plan(self) -> None:
        if self._behind and not self._is_planned:
            self._is_planned = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        """Work for a bounded number of rows, unless a turn is about to run: it plans the next step."""
        self._is_planned = False
        runner = self._runner
        if runner.failure is not None or runner.is_closed or runner.is_suspended:
            self._behind.clear()  # of partitions that are gone: the topic is loaded again
        if self._is_turn_planned():
            return
        now, left = runner.steady.now(), STEP_ROWS
        try:
            while self._behind and left > 0:
                left -= LOOK_ROWS + self._maintain(next(iter(self._behind)), now, left)
        except Exception as error:  # a bug: the in-memory state can no longer be trusted
            log.exception("maintenance of a partition failed; topic will be reloaded", topic=runner.name)
            runner.poison(error)
            return
        if not self._behind:
            self._rows = self._turns = 0
        self._plan()

    def _maintain(self, number: int, now: Now, budget: int) -> int:
        """Work on one partition. Return the rows of its heap that were merged, or `budget` if that is not all."""
        del self._behind[number]
        partition = self._runner.loaded.topic.partitions[number]
        before = partition.entries.heap.work
        if partition.maintain(now, budget):
            self._behind[number] = None  # more is left
            return budget
        return (
            budget if partition.entries.has_timers else partition.entries.heap.work - before
        )  # timers do not count their work
