"""Handler of MessageHistory: reads one message's life from the journal, in I/O threads, a bounded part per call.

The index leads to the unit with the message's record. From there every unit is read, because later events may be
anywhere; a frame that cannot concern the message is not decoded. A cursor continues at a unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from heapline.contract import inspection
from heapline.contract.call import Context, cursor_of, read_cursor
from heapline.contract.check import describe_types
from heapline.contract.errors import MessageNotFound
from heapline.contract.fields import OFFSET_MAX
from heapline.contract.inspection import MessageEvent, MessageLife
from heapline.contract.message import from_ms
from heapline.core import events as ev
from heapline.core.ids import partition_of
from heapline.core.message_life import Life, LifeEvent
from heapline.core.now import Now
from heapline.engine.handlers import handles
from heapline.engine.lookup import owner
from heapline.engine.runner import TopicRunner
from heapline.engine.topics import TopicKeeper
from heapline.journal.reader import LogReader
from heapline.journal.unit import Unit

JOB_BYTES = 4 << 20  # of the journal that one job in a thread reads
CALL_BYTES = 64 << 20  # that one call reads


class _Cursor(msgspec.Struct, array_like=True):
    unit: Annotated[int, Meta(ge=0, le=OFFSET_MAX)]
    since: Annotated[int, Meta(ge=0, le=1 << 47)]  # journal time of the first unit that was read, ms
    life: Life


describe_types(_Cursor)


class _Scan:
    """Reads units from a position on; used by one thread at a time."""

    def __init__(self, reader: LogReader, life: Life, units: Iterator[Unit]) -> None:
        self._reader, self._units, self._partition = reader, units, partition_of(life.id)
        self.life = life
        self.found: list[LifeEvent] = []
        self.first_at: int | None = None  # times of units, ms
        self.last_at = 0
        self.next_unit = 0
        self.bytes_read = 0
        self.is_at_end = False

    def step(self, limit: int) -> None:
        """Read about JOB_BYTES, until the end of the log, of the message's life, or `limit` entries."""
        stop = self.bytes_read + JOB_BYTES
        while self.bytes_read < stop and len(self.found) < limit and not self.life.ended:
            unit = next(self._units, None)
            if unit is None:
                self.is_at_end = True
                return
            self._read(unit)

    def _read(self, unit: Unit) -> None:
        self.first_at = unit.time if self.first_at is None else self.first_at
        self.last_at, self.next_unit = unit.time, unit.number + 1
        self.bytes_read += len(unit.data)
        for frame in unit.frames:
            if frame.partition == self._partition and self.life.may_concern(frame.events, frame.first_id):
                offset = frame.first_offset
                for event in ev.decode_events(frame.events, f"unit {unit.number}"):
                    rows = None
                    if isinstance(event, ev.Enqueued | ev.BatchPrepared) and event.count:
                        rows = unit.rows(unit.blocks[event.block])[event.start : event.start + event.count]
                    self.found += self.life.read(event, rows, offset, unit.time)
                    offset += event.rows()


class _Start(NamedTuple):
    is_known: bool
    now: Now


@handles(inspection.MessageHistory)
async def message_history(
    broker: TopicKeeper, command: inspection.MessageHistory, context: Context
) -> inspection.MessageLife:
    runner = broker.runner(command.topic)
    id = runner.loaded.topic.find_id(command.message_id)
    start = await runner.call(lambda now: _look_up(runner, id, now))  # what was decided until now is durable after it
    cursor = read_cursor(command.cursor, _Cursor, None)
    if cursor is not None and cursor.life.id != id:
        cursor = None
    scan = await runner.read(_open, runner.loaded.journal.reader(), id, cursor)
    while True:
        await runner.read(scan.step, command.limit)
        is_new = not (scan.life.begun or scan.found or start.is_known)
        if is_new and (cursor is None or scan.is_at_end):  # the record's own unit, or the first that is left, was read
            raise MessageNotFound(runner.name, runner.loaded.topic.ulid(id))
        if scan.is_at_end or scan.life.ended or len(scan.found) >= command.limit or scan.bytes_read >= CALL_BYTES:
            return _answer(scan, cursor, start.now)


def _look_up(runner: TopicRunner, id: int, now: Now) -> _Start:
    partition = owner(runner, id)
    return _Start(partition.entries.find(id) is not None or partition.state.gone.find(id) is not None, now)


def _open(reader: LogReader, id: int, cursor: _Cursor | None) -> _Scan:
    if cursor is not None:
        return _Scan(reader, cursor.life, reader.read_units(start_unit=cursor.unit))
    place = reader.locate(partition_of(id), id=id)  # None: before the start of the journal
    return _Scan(reader, Life(id), reader.read_units(place=place))


def _answer(scan: _Scan, cursor: _Cursor | None, now: Now) -> MessageLife:
    is_over = scan.is_at_end or scan.life.ended
    found = [*scan.found, *(scan.life.still_due(now.steady) if is_over else ())]
    since = cursor.since if cursor is not None else scan.first_at
    following = None if is_over else cursor_of(_Cursor(scan.next_unit, since or 0, scan.life))
    return MessageLife(
        items=[_event(entry) for entry in found],
        is_complete=scan.life.begun,
        known_since=None if since is None else from_ms(since),
        read_until=from_ms(now.steady if is_over else scan.last_at),
        cursor=following,
    )


def _event(entry: LifeEvent) -> MessageEvent:
    return MessageEvent(
        kind=entry.kind,
        at=from_ms(entry.at),
        offset=entry.offset,
        attempts=entry.attempts,
        holder=entry.holder,
        deadline=None if entry.deadline is None else from_ms(entry.deadline),
        due_at=None if entry.due is None else from_ms(entry.due),
        priority=entry.priority,
        reason=entry.reason,
        group=entry.group,
        batch=entry.batch,
    )
