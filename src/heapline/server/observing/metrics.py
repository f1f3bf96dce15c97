"""A server's metrics: gathers rows when somebody asks, and keeps what only the server knows.

Reading is one step on the event loop for each source; the text is made in a thread. Two who ask at once share it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.metadata import version

from heapline.engine.embedded import EmbeddedBroker
from heapline.engine.measures import Measures, measure
from heapline.server.observing.calls import CallCounts
from heapline.server.observing.exposition import expose
from heapline.server.observing.families import BY_NAME
from heapline.server.observing.readings import Rows, Value, WalBytes, add_disk, add_schedules, add_topics
from heapline.server.observing.timed_disk import TimedDisk


class Metrics:
    def __init__(self, broker: EmbeddedBroker) -> None:
        self._broker = broker
        self._wal = WalBytes()
        self._watched: dict[str, Callable[[], Value]] = {"audit_lines_lost_total": lambda: 0}
        self._asking: asyncio.Task[bytes] | None = None
        self.calls = CallCounts()
        if isinstance(broker.disk, TimedDisk):
            self.watch("fsync_latency_ms", broker.disk.tally)

    def watch(self, name: str, read: Callable[[], Value]) -> None:
        """Have a metric without labels read from there; the name must stand in the table."""
        if BY_NAME[name].labels:
            raise ValueError(f"{name} has labels")
        self._watched[name] = read

    async def text(self) -> bytes:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._text())
        return await asyncio.shield(self._asking)

    async def _text(self) -> bytes:
        measures = await measure(self._broker)
        rows = Rows()
        self.calls.add_to(rows)
        for name, read in self._watched.items():
            rows.add(name, (), read())
        return await asyncio.to_thread(self._finish, rows, measures)

    def _finish(self, rows: Rows, measures: Measures) -> bytes:
        add_topics(rows, measures)
        add_disk(rows, self._broker.path)
        own = [measures.system]
        if measures.schedules is not None:
            add_schedules(rows, measures.schedules)
            own.append(measures.schedules.journal)
        journals = [*measures.topics, *(journal for journal in own if journal is not None)]
        rows.add("wal_bytes_written_total", (), self._wal.total(journals))
        rows.add("build_info", (version("heapline"),), 1)
        return expose(rows)
