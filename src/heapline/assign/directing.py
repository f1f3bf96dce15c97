"""A leader's hands: carries out what leading.py decides, on the store and with the strategy.

It decides nothing. Every write is by compare-and-set on what the decision was based on; one that fails, or is not
answered, leaves the decision to the next look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from heapline.assign.beating import patience, within
from heapline.assign.config import Config
from heapline.assign.document import Document
from heapline.assign.errors import AssignmentVersionMismatch
from heapline.assign.kv import KV, Conflict, Entry
from heapline.assign.leading import Ask, Decision, Leading
from heapline.assign.leases import Bar, Tombstone
from heapline.assign.records import ASSIGNMENT_KEY, WORKER_PREFIX, Standing, WorkerRecord, decode, encode, worker_key
from heapline.assign.strategies import AssignmentStrategy, affinity, checked

VIRTUAL_NODES = 150  # for each worker, as a rule
IN_THREAD_FROM = 20_000  # partitions and virtual nodes: above, the strategy would hold up heartbeats


class Director:
    """One term of leading."""

    def __init__(
        self, kv: KV, config: Config, clock: Callable[[], float], leading: Leading, strategy: AssignmentStrategy,
        on_plan: Callable[[float, float], None],
    ) -> None:  # fmt: skip
        self._kv, self._config, self._clock, self._strategy = kv, config, clock, strategy
        self._patience = patience(config)
        self._on_plan = on_plan  # (seconds it took to calculate, share of the weight that stays)
        self.leading = leading

    # --- readings

    async def list_workers(self) -> None:
        entries = await within(self._patience, self._kv.entries(WORKER_PREFIX))
        for entry in entries:
            self.feed(entry)
        self.leading.sessions.listed({entry.key.removeprefix(WORKER_PREFIX) for entry in entries}, self._clock())

    def feed(self, entry: Entry, seen_at: float | None = None) -> bool:
        """A worker's key, from wherever; whether that was news that may need action."""
        record = decode(entry.value, WorkerRecord)
        if record is None:
            return False
        worker = entry.key.removeprefix(WORKER_PREFIX)
        return self.leading.sessions.see(worker, record, entry.revision, self._clock() if seen_at is None else seen_at)

    # --- carrying out

    async def carry_out(self, decision: Decision) -> bool:
        """Whether something changed, so that another look is worth it."""
        for write in decision.writes:
            await (self._bury(write) if isinstance(write, Tombstone) else self._bar(write))
        if decision.writes:
            return True  # the crowd may be another now
        if decision.publish is not None:
            return await self._publish(decision.publish)
        if decision.ask is not None:
            await self._plan(decision.ask)
            return True
        return False

    async def _bury(self, stone: Tombstone) -> None:
        confirmed = self.leading.sessions.confirmed(stone.worker, stone.session)
        record = WorkerRecord(session=stone.session, standing=Standing.ENDED, confirmed=confirmed)
        key, ttl = worker_key(stone.worker), float(self._config.worker_id_ttl)
        try:
            revision = await within(self._patience, self._kv.update(key, encode(record), stone.revision, ttl=ttl))
        except Conflict:
            entry = await within(self._patience, self._kv.get(key))
            if entry is not None:
                self.feed(entry)
            return
        self.leading.sessions.see(stone.worker, record, revision, self._clock())

    async def _bar(self, bar: Bar) -> None:
        record = WorkerRecord(standing=Standing.BARRED)
        key, ttl = worker_key(bar.worker), float(self._config.worker_id_ttl)
        try:
            revision = await within(self._patience, self._kv.create(key, encode(record), ttl=ttl))
        except Conflict:
            return  # it is there after all; the next listing shows it
        self.leading.sessions.see(bar.worker, record, revision, self._clock())

    async def _publish(self, document: Document) -> bool:
        value, over = document.encode(), self.leading.revision
        try:
            writing = self._kv.update(ASSIGNMENT_KEY, value, over) if over else self._kv.create(ASSIGNMENT_KEY, value)
            revision = await within(self._patience, writing)
        except Conflict:
            entry = await within(self._patience, self._kv.get(ASSIGNMENT_KEY))
            found = None if entry is None else Document.decode(entry.value)
            if entry is None or found is None or entry.revision <= over:
                # A reading from the past, as a rule; if it stays so, somebody has removed the document.
                raise AssignmentVersionMismatch(document.version - 1, 0 if found is None else found.version) from None
            self.leading.see_document(found, entry.revision, self._clock())
            return True
        self.leading.published(document, revision, self._clock())
        return True

    async def _plan(self, ask: Ask) -> None:
        began = time.perf_counter()
        question = (self._strategy, ask.workers, ask.partitions, ask.previous)
        if len(ask.partitions) + VIRTUAL_NODES * len(ask.workers) > IN_THREAD_FROM:
            targets = await asyncio.to_thread(checked, *question)
        else:
            targets = checked(*question)
        self.leading.planned(ask, targets, self._clock())
        self._on_plan(time.perf_counter() - began, affinity(ask.previous, targets))
