"""Compare everything visible of a partition with the naive one."""

from __future__ import annotations

import numpy as np

from heapline.core.fairness.keys import NO_KEY, hash_of
from heapline.core.leases import Lease
from heapline.core.live_map import LiveMap
from heapline.core.partition import Partition
from heapline.core.record import attempts_of, size_class
from tests.unit.core.naive import NaiveMessage
from tests.unit.core.rig_journal import PLACES, JournalRig


class CheckingRig(JournalRig):
    def check(self, p: Partition | None = None, look: bool = False) -> None:
        """Check that the partition equals the model. With `look`, also the next messages."""
        p = p or self.p
        model = self.model
        assert p.entries.ready == model.count("ready")
        assert p.entries.delayed == model.count("delayed")
        assert len(p.entries.leases) == model.count("leased")
        assert len(p.entries.dead) == model.count("dead")
        entries = len(p.entries.heap) + p.entries.parked.rows + len(p.entries.delays) + len(p.entries.calendar)
        assert p.entries.stale == entries - p.entries.ready - p.entries.delayed >= 0
        for m in model.messages.values():
            self._check_message(p, m)
        self._check_bookkeeping(p)
        self._check_live(p.entries.live)
        if p.fairness is not None:
            self._check_parked(p)
        if look:
            self._check_next(p)

    def _check_message(self, p: Partition, m: NaiveMessage) -> None:
        found = p.entries.find(m.id)
        if not m.is_living:
            assert found is None
            gone = p.state.gone.find(m.id)
            assert gone is not None
            assert gone == (m.state, m.ended_at, m.end_reason)
            return
        assert found is not None, f"{m} is lost"
        assert PLACES[found.place] == m.state
        assert found.position == self._position(m)
        key = p.entries.ordering.key(m.priority, m.enqueued_at)
        assert found.key == (p.entries.ordering.with_turns(key, m.turn) if p.fairness is not None else key)
        if m.state == "delayed":
            assert (found.due, found.wall) == (m.due, m.wall)
        assert p.entries.reasons.get(m.id) == m.reason
        if m.lease is not None:
            lease: Lease = p.entries.leases.by_id[m.id]
            expected = (m.lease.token, found.position, found.key, m.lease.deadline, m.lease.started, m.lease.holder)
            assert lease == expected
        if m.state == "dead":
            assert p.entries.dead[m.id] == (found.position, found.key, m.end_reason, m.ended_at)

    def _position(self, m: NaiveMessage) -> int:
        segment, place = self.where[m.id]
        size = size_class(np.int64(self.records[m.id]["payload_len"]))
        return int(self.topic.layout.pack(segment, place, int(size), m.attempts))

    def _check_bookkeeping(self, p: Partition) -> None:
        """Check that nothing is kept of removed messages."""
        messages = self.model.messages
        living = {m.id for m in messages.values() if m.is_living}
        assert {id for id, m in messages.items() if m.lapsed} == p.entries.lapsed
        delayed = {id for id in living if messages[id].state == "delayed"}
        assert p.entries.retrying <= delayed
        assert {id for id in delayed - p.entries.touched.keys() if messages[id].attempts} <= p.entries.retrying
        assert p.entries.shown <= delayed
        if self.config.streams:
            assert (
                {id for id in delayed & self.streamed if not messages[id].attempts} <= p.entries.shown <= self.streamed
            )
        assert p.entries.touched.keys() <= living
        assert p.entries.limits == {
            id: messages[id].max_retries for id in living if messages[id].max_retries is not None
        }
        assert p.entries.reasons.keys() <= living

    def prepared_ids(self) -> list[int]:
        """Return the messages in parts of undecided batches."""
        return []

    def _check_parked(self, p: Partition) -> None:
        """If a key has f free slots, the heap holds its f best messages, or all of them; and leases are counted."""
        assert p.fairness is not None
        assert p.entries.key_hashes is not None
        living = [m for m in self.model.messages.values() if m.is_living]
        assert len(p.entries.key_hashes) == len(living) + len(self.prepared_ids())
        in_heap: set[int] = set()
        for run in p.entries.heap.runs():
            rows = run.rest()
            in_heap.update(rows.ids[p.entries.good_ready(*rows)].tolist())
        for name in {m.fairness for m in living}:
            mine = [m for m in living if m.fairness == name]
            key = NO_KEY if name is None else hash_of(name.encode())
            assert p.entries.hashes_of(np.array([m.id for m in mine])).tolist() == [key] * len(mine)
            leased = sum(m.state == "leased" for m in mine)
            assert p.fairness.share.leases_of(key) == (
                leased if self.config.max_inflight_per_key and name is not None else 0
            )
            ready = sorted((m for m in mine if m.state == "ready"), key=self.model.place_in_line)
            assert {m.id for m in ready[: p.fairness.share.free(key)]} <= in_heap

    def _check_live(self, live: LiveMap) -> None:
        expected: dict[int, list[int]] = {}
        living = [m.id for m in self.model.messages.values() if m.is_living]
        for id in (*living, *self.prepared_ids()):
            segment, place = self.where[id]
            expected.setdefault(segment, []).append(place)
        for segment in {*live.segments(), *expected}:
            assert live.count(segment) == len(expected.get(segment, []))
            assert live.places(segment).tolist() == sorted(expected.get(segment, []))

    def _check_next(self, p: Partition) -> None:
        rows = p.eligible(len(self.model.messages) + 1)
        line = self.model.line()
        assert rows.ids.tolist() == [m.id for m in line]
        assert attempts_of(rows.positions).tolist() == [m.attempts for m in line]
        for count in (1, len(line) + 1):
            assert [row[1] for row in reversed(p.candidates(count))] == [m.id for m in line[:count]]
        head = p.head()
        assert (None if head is None else head[1]) == (line[0].id if line else None)
        wake, waits = p.next_wake_in(self.now), self.model.changes_in(self.now)
        if waits:
            assert wake is not None
            assert wake < max(0, min(waits)) + p.entries.delays.tick_ms, "it would wake too late"
