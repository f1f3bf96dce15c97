"""Check the record of a killed process against the queue's promises. `Evidence` reads killer.py's side file by line.

A call with a "done" line was answered and must hold forever; one with only a "begin" may have happened or not. Each
check is named for its promise; a broken one raises AssertionError with the facts. It reads only the record,
no files; `LogAudit` (audit.py) reads the journal itself.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENDS = ("ack", "nack", "release", "bury")


@dataclass
class Lease:
    token: int
    attempts: int
    deadline: int
    ending: bool = False  # the holder has begun to end it


@dataclass
class Batch:
    size: int
    not_before: int  # wall ms: no message of it may be delivered earlier
    ids: list[int] | None = None  # once answered
    seen: set[str] = field(default_factory=set)


@dataclass
class Said:
    """Everything known of one topic from the record."""

    batches: dict[str, Batch] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)  # the last one of each message
    tokens: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    acked: dict[int, int] = field(default_factory=dict)  # answered: id -> token
    ack_begun: set[int] = field(default_factory=set)
    ended: list[tuple[str, int, int]] = field(default_factory=list)  # answered: how, id, token

    @property
    def enqueued(self) -> list[int]:
        """Ids whose enqueue was answered."""
        return [id for batch in self.batches.values() for id in batch.ids or ()]

    @property
    def must_live(self) -> list[int]:
        """Enqueues that were answered and whose ack no worker has begun."""
        return [id for id in self.enqueued if id not in self.ack_begun]


class Evidence:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._begun: dict[tuple[int, int], Any] = {}
        self.topics: dict[str, Said] = defaultdict(Said)
        self.answered: Counter[str] = Counter()

    def take_in(self) -> None:
        """Read what was recorded since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                assert line.endswith(b"\n"), "incomplete line: it was not written by one write"
                self._read += len(line)
                self._take(*json.loads(line))

    def _take(self, run: int, stage: str, call: int, what: str, topic: str, facts: Any) -> None:
        said = self.topics[topic]
        if stage == "begin":
            self._begun[run, call] = facts
            if what == "enqueue":
                batch, size, delay, at = facts
                said.batches[batch] = Batch(size, at + round((delay or 0) * 1000))
            elif what in ENDS:
                self._ending(said, what, facts)
        else:
            self.answered[what] += 1
            begun = self._begun.pop((run, call))
            getattr(self, f"_{what}", self._end)(said, begun, facts, what)

    def _ending(self, said: Said, what: str, pairs: list[list[int]]) -> None:
        for id, token in pairs:
            lease = said.leases.get(id)
            if lease is not None and lease.token == token:
                lease.ending = True
            if what == "ack":
                said.ack_begun.add(id)

    def _enqueue(self, said: Said, begun: Any, ids: list[int], _: str) -> None:
        said.batches[begun[0]].ids = ids

    def _pop(self, said: Said, begun: Any, facts: Any, _: str) -> None:
        at, rows = facts
        order = [(priority, id) for id, _, _, priority, *_ in rows]
        assert order == sorted(order), f"a pop is out of order: {order}"
        for id, token, attempts, _, deadline, granted, tag in rows:
            assert id not in said.acked, f"NoAckedComesBack: message {id} was acked and is delivered again"
            self._single_lease(said, id, token, attempts, granted)
            said.leases[id] = Lease(token, attempts, deadline)
            batch = said.batches[tag.rpartition(".")[0]]
            batch.seen.add(tag)
            assert at >= batch.not_before, f"NeverEarly: {tag} was delivered {batch.not_before - at} ms early"
            assert batch.ids is None or id in batch.ids, f"{tag} was delivered with another id than was answered"

    def _single_lease(self, said: Said, id: int, token: int, attempts: int, granted: int) -> None:
        before = said.leases.get(id)
        assert token not in said.tokens[id], f"SingleLease: message {id} was leased twice with token {token}"
        said.tokens[id].add(token)
        if before is not None and not before.ending:
            early = before.deadline - granted
            assert early <= 0, f"SingleLease: message {id} was leased again {early} ms before its lease ended"

    def _extend(self, said: Said, begun: Any, facts: Any, _: str) -> None:
        lost, deadlines = facts
        for (id, token), (_, deadline) in zip(begun, deadlines, strict=True):
            lease = said.leases.get(id)
            if id not in lost and lease is not None and lease.token == token:
                lease.deadline = max(lease.deadline, deadline)

    def _end(self, said: Said, begun: Any, facts: Any, what: str) -> None:
        if what == "replay":
            return
        lost = set(facts[0])
        for id, token in begun:
            if id not in lost:
                said.ended.append((what, id, token))
                if what == "ack":
                    said.acked[id] = token

    def check_batches_drained(self, topic: str) -> None:
        """After everything was popped: of each batch, answered or not, all messages were seen, or none."""
        for name, batch in self.topics[topic].batches.items():
            assert len(batch.seen) in (0, batch.size), f"BatchAllOrNothing: {len(batch.seen)} of {batch.size} in {name}"
            assert batch.seen or batch.ids is None, f"NoLostMessage: answered batch {name} was never seen"
