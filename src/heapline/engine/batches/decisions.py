"""Committed batches: the system journal, an internal topic that users cannot name.

A decision is one message of that topic, made durable like any other; it makes a commit across several topics one step.
It is read back at open, and kept until `decision_retention` is over and every topic has applied it. A forgotten
decision makes a late repeat of its commit fail (`UnknownPart`); it never duplicates anything.

*Sinks.* A commit may belong to a sink, under a version that increases. The decision with the highest version of each
sink is never forgotten without an explicit `forget_sink`: it makes a repeat a no-op forever. A few older decisions of a
sink are kept as long as other decisions. The rest are not needed, because their versions prove that they were
committed, and a stream makes one every second.

*In doubt.* When the write of a decision fails, it is unknown whether it is on disk. No batch is decided then until the
journal has been read again (`settle`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

import msgspec

from heapline.contract.errors import BadRequest, RequestError, ResourceExhausted
from heapline.contract.message import Outgoing, SinkInfo, from_ms
from heapline.engine.columns import EnqueueCall
from heapline.engine.internal_topic import CONFIG, InternalTopic, cancel

NAME = "batches"
SINK_KEPT = 16  # decisions kept per sink, including the last one


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A commit decision. On disk as msgpack; a field that is added later gets a default."""

    batch_id: str
    parts: list[str]
    topics: list[str]
    count: int  # messages that it makes visible
    at: int  # wall ms
    left_out: dict[str, list[int]] = {}  # topic -> ids that repeat an identity of an earlier part
    sink: str = ""  # the sink that it belongs to; "": none
    version: int = -1  # its version in that sink

    def as_sink(self) -> SinkInfo:
        return SinkInfo(
            name=self.sink,
            version=self.version,
            batch_id=self.batch_id,
            messages=self.count,
            topics=self.topics,
            committed_at=from_ms(self.at),
        )


_decode = msgspec.msgpack.Decoder(Decision).decode


class Decisions:
    """The decisions, in memory and on disk. The topic is created when the first decision is recorded."""

    def __init__(self, topic: InternalTopic) -> None:
        self.topic = topic
        self._by_batch: dict[str, tuple[Decision, int]] = {}  # and the id of its message
        self._by_sink: dict[str, dict[int, str]] = {}  # sink -> version -> batch
        self._doubts = 0  # failed writes of decisions
        self._reading = asyncio.Lock()
        self._settled = 0  # how many of `_doubts` were settled by reading again

    def get(self, batch_id: str) -> Decision | None:
        found = self._by_batch.get(batch_id)
        return None if found is None else found[0]

    def all(self) -> list[Decision]:
        return [decision for decision, _ in self._by_batch.values()]

    def of_sink(self, sink: str) -> list[Decision]:
        """Return the known decisions of a sink, last one first. The last decision of a sink is always known."""
        versions = self._by_sink.get(sink, {})
        return [self._by_batch[versions[version]][0] for version in sorted(versions, reverse=True)]

    def last_of_sink(self, sink: str) -> Decision | None:
        versions = self._by_sink.get(sink)
        return self._by_batch[versions[max(versions)]][0] if versions else None

    def sinks(self) -> list[str]:
        return sorted(self._by_sink)

    def superseded(self) -> set[str]:
        """Return the batches of sinks that are not needed, because their versions prove that they were committed."""
        return {d.batch_id for sink in self._by_sink for d in self.of_sink(sink)[SINK_KEPT:]}

    def _know(self, decision: Decision, id: int) -> None:
        self._by_batch[decision.batch_id] = decision, id
        if decision.sink:
            self._by_sink.setdefault(decision.sink, {})[decision.version] = decision.batch_id

    @property
    def in_doubt(self) -> bool:
        return self._settled < self._doubts

    async def open(self) -> None:
        """Read the decisions of an earlier run."""
        self._doubts += 1  # until they are read
        await self._read()

    async def settle(self) -> list[Decision]:
        """Resolve all doubts or raise. Return the decisions found on disk that were not known here."""
        self.topic.check()
        if not self.in_doubt:
            return []
        async with self._reading:  # one task reads for all concurrent callers
            return await self._read() if self.in_doubt else []

    async def _read(self) -> list[Decision]:
        doubts = self._doubts
        found = [(_decode(data), id) for id, data in await self.topic.read()]
        # Added together: otherwise some would be applied while the others count as undecided.
        new = [(decision, id) for decision, id in found if decision.batch_id not in self._by_batch]
        for decision, id in new:
            self._know(decision, id)
        self._settled = max(self._settled, doubts)
        return [decision for decision, _ in new]

    async def record(self, decision: Decision) -> None:
        """Write a decision. Durable on return. If it raises, it may be durable only if `in_doubt` is True."""
        payload = msgspec.msgpack.encode(decision)
        if len(payload) > CONFIG.max_payload_bytes:
            raise BadRequest(f"{len(decision.parts)} parts are too many for one commit; prepare fewer, larger ones")
        runner = await self.topic.create()
        try:
            result = await runner.enqueue(EnqueueCall(runner.future(), message=Outgoing(payload)))
        except (RequestError, ResourceExhausted):
            raise  # refused before anything was written
        except BaseException:
            self._doubts += 1
            raise
        self._know(decision, result.id)

    async def forget(self, batch_ids: Iterable[str]) -> None:
        """Delete decisions that are no longer needed."""
        runner = self.topic.runner
        going = {batch_id: self._by_batch[batch_id][1] for batch_id in batch_ids if batch_id in self._by_batch}
        if runner is None or not going:
            return

        await runner.call(partial(cancel, runner, going.values()))
        for batch_id in going:
            decision, _ = self._by_batch.pop(batch_id, (None, 0))  # a concurrent call may have removed it
            if decision is not None and decision.sink:
                versions = self._by_sink[decision.sink]
                del versions[decision.version]
                if not versions:
                    del self._by_sink[decision.sink]
