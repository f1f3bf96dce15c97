"""The life of one message, from the events of its partition: pure, event by event, with a state that fits a cursor.

Some events name no messages. A purge concerns the message if it waits at that time. A timer that fires is recorded
by number only, on topics without streams and fairness keys. Then the entry `due` has the time at which it was due,
which is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from heapline.core import events as ev
from heapline.core.events import I64, KIND_NAMES, AnyEvent, IdEvent

FINAL = frozenset(("acked", "cancelled", "purged", "dropped", "dead_deleted", "batch_aborted", "expired"))
_ID_BYTES = 8
_PURGED = msgspec.msgpack.encode(ev.Purged.__struct_config__.tag)


class LifeEvent(msgspec.Struct, kw_only=True):
    kind: str  # as in the log, and "due"
    at: int  # ms
    offset: int | None = None
    attempts: int | None = None
    holder: str | None = None
    deadline: int | None = None
    due: int | None = None  # None: immediately
    priority: int | None = None
    reason: str | None = None
    group: str | None = None
    batch: str | None = None


class Life(msgspec.Struct):
    """The state of a message that reading on requires. A cursor contains it."""

    id: int
    begun: bool = False  # its enqueue was read
    ended: bool = False
    waits: bool = False
    due: Annotated[int, Meta(ge=0)] = 0  # ms; 0: it is ready, or not waiting
    batch: str = ""  # undecided batch that it belongs to

    def may_concern(self, events: bytes, first_id: int) -> bool:
        """Return whether a frame can contain something about the message, without decoding it."""
        return first_id >= 0 or self.id.to_bytes(_ID_BYTES, "little") in events or _PURGED in events or bool(self.batch)

    def read(self, event: AnyEvent, rows: Any, offset: int, at: int) -> Iterator[LifeEvent]:
        """Yield what an event did to the message. `rows` are the records of an event that has some."""
        found = self._entry(event, rows, offset, at)
        if found is None:
            return
        if found.kind == "fired":
            self.due = 0
        elif self.due and self.due <= at:
            yield LifeEvent(kind="due", at=self.due)
            self.due = 0
        self.waits = found.kind in _WAITS
        self.due = found.due or 0 if self.waits else 0
        self.ended = found.kind in FINAL
        yield found

    def still_due(self, now: int) -> Iterator[LifeEvent]:
        """Yield that it became due, at the end of the log."""
        if self.due and self.due <= now:
            yield LifeEvent(kind="due", at=self.due)

    def _entry(self, event: AnyEvent, rows: Any, offset: int, at: int) -> LifeEvent | None:
        kind = KIND_NAMES[type(event)]
        if isinstance(event, ev.Enqueued | ev.BatchPrepared):
            return self._arrived(event, kind, rows, offset, at)
        if isinstance(event, ev.Purged):
            return LifeEvent(kind=kind, at=at, offset=offset) if self.waits else None
        if isinstance(event, ev.BatchAborted | ev.BatchCommitted) and self.batch == event.batch_id:
            return self._decided(event, kind, offset, at)
        index = _index(event, self.id)
        if index is None:
            return None
        entry = LifeEvent(kind=kind, at=at, offset=offset + index)
        _describe(entry, event, index)
        return entry

    def _arrived(
        self, event: ev.Enqueued | ev.BatchPrepared, kind: str, rows: Any, offset: int, at: int
    ) -> LifeEvent | None:
        index = np.flatnonzero(rows["id"] == self.id) if event.count else ev.EMPTY
        if not len(index):
            return None
        row = rows[int(index[0])]
        self.begun = True
        due = int(row["due"]) or None
        entry = LifeEvent(kind=kind, at=at, due=due, priority=int(row["priority"]))
        if isinstance(event, ev.BatchPrepared):
            self.batch = entry.batch = event.batch_id
            self.due = due or 0
        else:
            entry.offset = offset + int(index[0])
        return entry

    def _decided(self, event: ev.BatchAborted | ev.BatchCommitted, kind: str, offset: int, at: int) -> LifeEvent | None:
        if isinstance(event, ev.BatchAborted):
            return LifeEvent(kind=kind, at=at, batch=event.batch_id)
        index = _index(event, self.id)
        if index is not None:
            self.batch = ""
            return LifeEvent(kind=kind, at=at, offset=offset + index, batch=event.batch_id, due=self.due or None)
        return None if event.more else LifeEvent(kind="dropped", at=at, batch=event.batch_id)


_WAITS = frozenset(
    ("enqueued", "batch_committed", "nacked", "lease_expired", "released", "replayed", "rescheduled", "fired")
)


def _index(event: AnyEvent, id: int) -> int | None:
    """Return the row of a message in an event that names messages."""
    ids: I64 | None = event.ids if isinstance(event, IdEvent | ev.Fired) else None
    if isinstance(event, ev.Expired):
        ids = np.concatenate((event.ids, event.leased))
    found = ev.EMPTY if ids is None else np.flatnonzero(ids == id)
    return int(found[0]) if len(found) else None


def _describe(entry: LifeEvent, event: Any, index: int) -> None:
    for name in ("reason", "group"):
        setattr(entry, name, getattr(event, name, None))
    if isinstance(event, ev.Leased):
        entry.attempts = event.attempts[index]
        ends = np.cumsum([grant.count for grant in event.grants])
        grant = event.grants[int(np.searchsorted(ends, index, side="right"))]
        entry.holder, entry.deadline = grant.holder, grant.deadline
    elif isinstance(event, ev.Extended):
        entry.deadline = int(event.deadlines[index])
    elif isinstance(event, ev.DeadLettered) and not event.kept:
        entry.kind = "dropped"
    elif isinstance(event, ev.Expired) and index >= len(event.ids):
        entry.kind = "ttl_ended"  # it is removed when its lease ends
    elif isinstance(event, ev.Rescheduled):
        entry.priority = int(event.priorities[index])
    dues = getattr(event, "dues", None)
    if dues is not None:
        entry.due = int(dues[index]) or None
