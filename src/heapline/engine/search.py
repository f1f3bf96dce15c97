"""Handler of SearchMessages: reads the records of live messages in the order of the journal and compares them.

No index exists, so a search reads everything, a bounded part per call. The records are read and compared in I/O
threads, some hundred at a time; a message's state is read afterwards, in a turn of its own for each match.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from heapline.contract import inspection
from heapline.contract.call import Context, cursor_of, read_cursor
from heapline.contract.inspection import FoundMessage, SearchMessages, SearchResult
from heapline.contract.message import MessageInfo
from heapline.core.events import EMPTY, I64
from heapline.core.ids import partition_of
from heapline.core.now import Now
from heapline.engine.handlers import handles
from heapline.engine.lookup import Record, living
from heapline.engine.runner import TopicRunner
from heapline.engine.topics import TopicKeeper

CALL_RECORDS = 20_000  # records that one call reads
CALL_BYTES = 32 << 20
STEP_RECORDS = 256
STEP_BYTES = 2 << 20
PLACES_BYTES = 4 << 20  # of a segment, in which one turn looks for live records
EXCERPT = 40  # characters before and after a match
Cursor = tuple[
    int, Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0, le=1 << 60)]
]  # segment, offset, messages read


class _Match(NamedTuple):
    where: str
    excerpt: str


class _Query:
    def __init__(self, command: SearchMessages) -> None:
        self._key = command.key
        self._text = None if command.text is None else command.text.casefold()
        name, equals, value = (command.header or "").partition("=")
        self._header = None if command.header is None else (name, value if equals else None)

    def match(self, record: Record) -> _Match | None:
        """Return where everything that was asked for is found; the text's place if there is one."""
        if self._key is not None and record.key != self._key:
            return None
        found = _Match("key", (record.key or "")[: 2 * EXCERPT])
        if self._header is not None:
            name, value = self._header
            if name not in record.headers or value not in (None, record.headers[name]):
                return None
            found = _Match(f"header {name}", record.headers[name][: 2 * EXCERPT])
        return found if self._text is None else self._find(self._text, record)

    @staticmethod
    def _find(text: str, record: Record) -> _Match | None:
        headers = {f"header {name}": f"{name}={value}" for name, value in record.headers.items()}
        places = {"key": record.key or "", "fairness_key": record.fairness_key or "", **headers}
        for where, content in places.items():
            if text in content.casefold():
                return _excerpt(where, content, text)
        if text.isascii() and text.encode() not in record.payload.lower():
            return None  # without decoding the payload
        content = record.payload.decode(errors="replace")
        return _excerpt("payload", content, text) if text in content.casefold() else None


def _excerpt(where: str, content: str, text: str) -> _Match:
    at = content.casefold().find(text)  # folding may change lengths: then the excerpt is a little off
    start, end = max(0, at - EXCERPT), at + len(text) + EXCERPT
    cut = content[start:end]
    return _Match(where, f"{'…' if start else ''}{cut}{'…' if end < len(content) else ''}")


class _Found(NamedTuple):
    record: Record
    match: _Match
    following: Cursor


class _Search:
    def __init__(self, runner: TopicRunner, command: SearchMessages) -> None:
        self._runner, self._query = runner, _Query(command)
        self.at: Cursor | None = read_cursor(command.cursor, Cursor, (-1, 0, 0))
        self._records, self._bytes, self._step = 0, 0, 16
        self._places: I64 = EMPTY  # of `_segment`, before `at`, not read yet; some may have ended since
        self._segment = 0

    @property
    def has_budget(self) -> bool:
        return self._records < CALL_RECORDS and self._bytes < CALL_BYTES

    def _find_places(self, now: Now) -> None:
        """Find places of records to read, in this part of the segment or the next, and move on to it."""
        assert self.at is not None
        live, (segment, offset, read) = self._runner.loaded.topic.live, self.at
        segments = live.segments()
        following = segments[bisect_left(segments, segment) :]
        if not following:
            self.at = None
            return
        start = offset if following[0] == segment else 0
        self._places, rest = live.places_from(following[0], start, PLACES_BYTES)
        self.at = (following[0] + 1, 0, read) if rest is None else (following[0], rest, read)
        self._segment = following[0]

    async def step(self) -> list[_Found]:
        """Read the next records; `at` is None at the end."""
        if not len(self._places):
            await self._runner.call(self._find_places)
        if self.at is None or not len(self._places):
            return []
        places, self._places = self._places[: self._step], self._places[self._step :]
        segment, rest, read = self.at
        found = await self._runner.read(self._compare, self._segment, places, read)
        self.at = segment, rest, read + len(places)
        return found

    @property
    def following(self) -> Cursor | None:
        """The place from which to read on; None at the end."""
        if self.at is None or not len(self._places):
            return self.at
        return self._segment, self._places.item(0), self.at[2]

    def _compare(self, segment: int, places: I64, read: int) -> list[_Found]:
        journal = self._runner.loaded.journal
        records = journal.load(journal.layout.pack(segment, places, np.zeros(len(places), dtype=np.int64)))
        nbytes = sum(map(len, records.payloads))
        self._records += len(places)
        self._bytes += nbytes
        per_record = max(1, nbytes // len(places))
        self._step = max(1, min(STEP_RECORDS, 4 * self._step, STEP_BYTES // per_record))
        found = []
        for i, place in enumerate(places.tolist()):
            if i not in records.bad:
                record = Record(records, i)
                if (match := self._query.match(record)) is not None:
                    found.append(_Found(record, match, (segment, place + 1, read + i + 1)))
        return found


@handles(inspection.SearchMessages)
async def search_messages(broker: TopicKeeper, command: SearchMessages, context: Context) -> SearchResult:
    runner = broker.runner(command.topic)
    search, items = _Search(runner, command), list[FoundMessage]()
    while search.has_budget and search.at is not None:
        for found in await search.step():
            info = await runner.call(partial(_living, runner, found.record))
            if info is not None and command.state in (None, info.state):
                items.append(FoundMessage(message=info, where=found.match.where, excerpt=found.match.excerpt))
                if len(items) == command.limit:
                    return _answer(runner, items, found.following)
    return _answer(runner, items, search.following)


def _answer(runner: TopicRunner, items: list[FoundMessage], following: Cursor | None) -> SearchResult:
    live = runner.loaded.topic.live
    total = sum(live.count(segment) for segment in live.segments())
    read = total if following is None else following[2]
    return SearchResult(
        items=items, read=read, total=max(total, read), cursor=None if following is None else cursor_of(following)
    )


def _living(runner: TopicRunner, record: Record, now: Now) -> MessageInfo | None:
    """Return the message of a record, without payload and headers; None if it has ended, or is only prepared."""
    topic = runner.loaded.topic
    partition = topic.partitions[partition_of(record.id)]
    found = partition.entries.find(record.id)
    if found is None:
        return None
    return msgspec.structs.replace(living(topic, partition, record.id, found, record), payload=None, headers={})
