"""Turn rows taken for members into batches and answer fetches once everything that the answer depends on is durable.

Records outside the pages are read during that wait. A batch whose caller was cancelled is kept for the next fetch of
the same session. A row whose record cannot be read is never delivered: it becomes a dead letter of the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from heapline.contract.errors import TopicReloading
from heapline.contract.stream import Fetched, StreamBatch
from heapline.core.groups.group import Group, Share
from heapline.core.groups.stream import StreamRows
from heapline.core.now import Now
from heapline.core.record import attempts_of
from heapline.engine.committer import refuse
from heapline.engine.groups.member_calls import FetchCall, GroupServing, Loose, split_share
from heapline.engine.groups.page_reader import page_of
from heapline.engine.groups.pages import Page, cut_records, pick_rows
from heapline.engine.loaded_topic import RunningTopic
from heapline.journal.records import BadRecord, Records
from heapline.logs import Log

log = Log("heapline.engine")
I64 = npt.NDArray[np.int64]
UNREADABLE = "record corrupt"


class Answering:
    def __init__(self, runner: RunningTopic, serving: GroupServing) -> None:
        self._runner, self._serving = runner, serving
        self._sent_generations: dict[tuple[str, str], tuple[str, int]] = {}  # (group, member) -> session, generation
        self._unsent: dict[tuple[str, str], tuple[str, list[StreamBatch]]] = {}

    def clear(self) -> None:
        self._unsent.clear()

    def forget(self, group: str, member: str | None = None) -> None:
        """Forget what was sent to a member, or to all members, so that the next answer reports it again."""
        for known in (self._sent_generations, self._unsent):
            for key in [key for key in known if key == (group, member) or (member is None and key[0] == group)]:
                del known[key]

    def knows_generation(self, call: FetchCall, generation: int) -> bool:
        return self._sent_generations.get((call.group, call.member)) == (call.session, generation)

    def split(self, group: Group, share: Share, page: Page | None, now: Now) -> list[StreamBatch | Loose]:
        loose, batch, bad = split_share(share, page, self._runner.name, self._runner.loaded.topic.id_suffix)
        elsewhere = None
        if len(bad):
            elsewhere, bad = self._look_elsewhere(group, share, bad)
        if len(bad):
            self._set_aside(group.name, share.partition, bad, now)
            self._tell_bad([] if page is None else list(page.bad.values()))
        return [part for part in (elsewhere, loose, batch) if part is not None]

    def _look_elsewhere(self, group: Group, share: Share, offsets: I64) -> tuple[Loose | None, I64]:
        """Find rows whose record is no longer where it was when the rows were added to the stream. Return the rows
        whose message is live and was rewritten since (`Moved`), with the current positions, and the offsets of the
        others. This scans all waiting messages, so call it only for such rows."""
        topic = self._runner.loaded.topic
        which = np.flatnonzero(np.isin(share.rows.offsets, offsets))
        which = which[np.argsort(share.rows.ids[which])]
        rows = share.rows.only(which)
        found = topic.partitions[share.partition].entries.positions_of(rows.ids)
        lives = (found >= 0) & (topic.layout.spot(found) != topic.layout.spot(rows.positions))
        if not lives.any():
            return None, offsets
        now_at = rows.only(lives)._replace(positions=found[lives] - attempts_of(found[lives]))
        group.moved(share.partition, now_at.ids, now_at.positions)
        return Loose(share.partition, now_at, share.attempts[which[lives]]), np.sort(rows.offsets[~lives])

    def answer(self, call: FetchCall, group: Group, parts: list[StreamBatch | Loose]) -> None:
        runner = self._runner
        reads, generation = group.members.reads(call.member), group.members.generation
        loose = [part for part in parts if isinstance(part, Loose)]
        finish = partial(self._finish, call, parts, sorted(reads), generation)
        if not loose:
            deliver: Callable[[], None] = partial(finish, None)
        else:
            positions = np.concatenate([part.rows.positions for part in loose])
            records, missing = runner.loaded.journal.cached(positions)
            if not len(missing):
                deliver = partial(finish, records)
            else:
                load = runner.load(positions[missing])
                deliver = partial(_after, load, partial(self._loaded, call, finish, records, missing))
        if self._rests_on_durable(group, parts):
            deliver()
        else:
            runner.loaded.committer.answer(deliver, (call.future,))

    def _rests_on_durable(self, group: Group, parts: list[StreamBatch | Loose]) -> bool:
        durable, tails = self._runner.loaded.committer.durable_unit, self._runner.loaded.topic.tails
        if self._serving.rests_on(group.name) > durable:
            return False
        for part in parts:
            tail = tails[part.partition]
            offsets = part.rows.offsets if isinstance(part, Loose) else part.offsets
            if tail is None or int(offsets[-1]) >= tail.durable_end(durable):
                return False
        return True

    def _loaded(
        self,
        call: FetchCall,
        finish: Callable[[Records], None],
        records: Records,
        missing: I64,
        load: asyncio.Future[Records],
    ) -> None:
        problem = None if load.cancelled() else load.exception()
        if problem is not None:
            log.error("records of a stream cannot be read", topic=self._runner.name, error=str(problem))
        if load.cancelled() or problem is not None:
            refuse(call.future, TopicReloading(self._runner.name, "records could not be read"))
            return
        records.fill(missing, load.result())
        finish(records)

    def _finish(
        self,
        call: FetchCall,
        parts: list[StreamBatch | Loose],
        reads: list[int],
        generation: int,
        records: Records | None,
    ) -> None:
        batches: list[StreamBatch] = []
        start = 0
        for part in parts:
            if isinstance(part, StreamBatch):
                batches.append(part)
                continue
            assert records is not None
            end = start + len(part.attempts)
            batches += self._build(call.group, part, cut_records(records, start, end))
            start = end
        if call.future.done():
            self.keep(call, batches)
            return
        group = self._runner.loaded.topic.groups.by_name.get(call.group)
        if group is not None and self._serving.sessions.is_current(call.group, call.member, call.session):
            self._sent_generations[call.group, call.member] = (call.session, generation)
            call.future.set_result(Fetched(_still_held(group, call.member, batches), reads, generation))
        else:  # the member left or was replaced meanwhile, and its rows belong to other members now
            call.future.set_result(Fetched([], [], generation))

    def _build(self, group: str, part: Loose, records: Records) -> list[StreamBatch]:
        offsets = part.rows.offsets
        page = page_of(
            self._runner, part.partition, StreamRows(part.rows, int(offsets[0]), int(offsets[-1]) + 1), records
        )
        share = Share(part.partition, part.rows, part.attempts)
        _, batch, bad = split_share(share, page, self._runner.name, self._runner.loaded.topic.id_suffix)
        if len(bad):
            self._tell_bad(list(page.bad.values()))
            self._runner.later(lambda now: self._set_aside(group, part.partition, bad, now))
        return [] if batch is None else [batch]

    def _set_aside(self, name: str, number: int, offsets: I64, now: Now) -> None:
        """Make rows with unreadable records dead letters of the group, whatever its retries."""
        group = self._runner.loaded.topic.groups.by_name.get(name)
        if group is None:
            return
        config = msgspec.structs.replace(group.config, max_retries=0)
        draws = self._serving.draw(len(offsets))
        events, _ = group.partitions[number].decide_fail(offsets, draws, UNREADABLE, now.steady, config)
        self._runner.counters.corrupt += len(offsets)
        for event in events:
            self._serving.emit(group, number, event, now)
        self._serving.acked(group, now)

    def _tell_bad(self, facts: list[BadRecord]) -> None:
        for fact in facts:
            log.error("record corrupt", topic=self._runner.name, path=fact.path, offset=fact.offset, detail=fact.detail)

    # -- undelivered batches ---------------------------------------------------------------------------------------

    def keep(self, call: FetchCall, batches: list[StreamBatch]) -> None:
        if batches and self._serving.sessions.is_current(call.group, call.member, call.session):
            _, kept = self._unsent.get((call.group, call.member), ("", []))
            self._unsent[call.group, call.member] = (call.session, kept + batches)

    def left_over(self, group: Group, call: FetchCall) -> list[StreamBatch]:
        """Return the batches kept from an earlier fetch of the session, as far as the member still holds their rows."""
        if not self._unsent or not call.max_messages:
            return []
        session, batches = self._unsent.pop((group.name, call.member), ("", []))
        if session != call.session:
            return []
        return self._first(call, _still_held(group, call.member, batches))

    def _first(self, call: FetchCall, batches: list[StreamBatch]) -> list[StreamBatch]:
        """Return up to `max_messages` rows and keep the rest."""
        given: list[StreamBatch] = []
        room = call.max_messages
        for at, batch in enumerate(batches):
            if len(batch) > room:
                self.keep(call, [pick_rows(batch, slice(room, None)), *batches[at + 1 :]])
                return [*given, pick_rows(batch, slice(room))] if room else given
            given.append(batch)
            room -= len(batch)
        return given


def _still_held(group: Group, member: str, batches: list[StreamBatch]) -> list[StreamBatch]:
    """Return the rows that did not time out or move to other members during the wait: a disk may stall for long."""
    found = []
    for batch in batches:
        if group.members.may_hold(member, batch.partition):
            place, offsets = group.partitions[batch.partition], batch.offsets
            if (offsets[1:] > offsets[:-1]).all():
                held = place.held(offsets)
            else:
                order = np.argsort(offsets, kind="stable")
                held = np.zeros(len(batch), dtype=np.bool_)
                held[order] = place.held(offsets[order])
            if held.any():
                found.append(batch if held.all() else pick_rows(batch, np.flatnonzero(held)))
    return found


def _after(load: asyncio.Future[Any], then: Callable[[asyncio.Future[Any]], None]) -> None:
    if load.done():
        then(load)
    else:
        load.add_done_callback(then)
