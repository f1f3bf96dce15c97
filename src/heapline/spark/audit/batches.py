"""Judge from the events of its parts whether each prepared batch was committed completely or not at all.

A part has a share in each partition that it reaches, possibly of several topics. A commit names parts: each of their
shares must appear with all its messages (only messages that repeat the identity of another part's message are left
out), and nothing else of the batch may appear. An undecided share is not a fault while the commit may be in progress. A
topic applies a decision before it serves anything else, so once its log continues after the commit, it is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from heapline.spark.audit.marks import Mark, Reach

TopicPartition = tuple[str, int]  # topic, partition


class Torn(NamedTuple):
    """A batch that was not atomic."""

    topic: str
    partition: int
    batch_id: str
    offset: int
    why: str


@dataclass
class _Share:
    part: str
    count: int
    identified: int
    offset: int
    ids: tuple[int, int] | None


@dataclass
class _PartitionBatch:
    """One batch in one partition, from its first part to its decision."""

    shares: dict[str, _Share] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    committed: int = 0
    commit: Mark | None = None
    aborted: Mark | None = None


class BatchBook:
    """All prepared batches of the audited topics."""

    def __init__(self, marks: Sequence[Mark], reaches: Sequence[Reach]) -> None:
        self._begins = {(reach.topic, reach.partition): reach.first for reach in reaches}
        self._last_unit: dict[str, int] = {}
        for reach in reaches:
            self._last_unit[reach.topic] = max(reach.last_unit, self._last_unit.get(reach.topic, 0))
        self._open: dict[tuple[TopicPartition, str], _PartitionBatch] = {}
        self._done: list[tuple[TopicPartition, str, _PartitionBatch]] = []
        for mark in sorted(marks, key=lambda m: (m.topic, m.partition, m.offset)):
            if mark.kind.startswith("batch_"):
                self._read(mark)
        self._all = self._done + [(where, batch, entry) for (where, batch), entry in self._open.items()]
        self.count = len({batch for _, batch, _ in self._all})

    def _read(self, mark: Mark) -> None:
        where, batch = (mark.topic, mark.partition), mark.batch_id or ""
        entry = self._open.setdefault((where, batch), _PartitionBatch())
        fields = mark.fields()
        if mark.kind == "batch_prepared":
            ids = (fields["first_id"], fields["last_id"]) if "first_id" in fields else None
            entry.shares[fields["part"]] = _Share(
                fields["part"], mark.messages, fields.get("identified", 0), mark.offset, ids
            )
            return
        if mark.kind == "batch_aborted":
            entry.aborted = mark
        else:
            entry.named |= set(fields["parts"])
            entry.committed += mark.named
            entry.commit = mark
            if fields["more"]:
                return
        self._done.append((where, batch, self._open.pop((where, batch))))

    def hidden(self, topic: str) -> dict[int, tuple[tuple[int, int], ...]]:
        """Return, by partition, the id ranges of shares that were not committed."""
        found: dict[int, list[tuple[int, int]]] = {}
        for (name, partition), _, entry in self._all:
            if name == topic:
                ranges = (s.ids for s in entry.shares.values() if s.part not in entry.named and s.ids is not None)
                found.setdefault(partition, []).extend(ranges)
        return {partition: tuple(ranges) for partition, ranges in found.items() if ranges}

    def torn(self) -> Iterator[Torn]:
        """Yield the batches that were not atomic."""
        named: dict[str, set[str]] = {}
        last: dict[tuple[str, str], int] = {}  # (topic, batch) -> unit of the last commit
        for (topic, _), batch, entry in self._all:
            if entry.commit is not None:
                named.setdefault(batch, set()).update(entry.named)
                last[topic, batch] = max(entry.commit.unit, last.get((topic, batch), 0))
        for where, batch, entry in self._all:
            yield from self._judge(where, batch, entry, named.get(batch, set()), last.get((where[0], batch)))

    def _judge(
        self, where: TopicPartition, batch: str, entry: _PartitionBatch, named: set[str], last: int | None
    ) -> Iterator[Torn]:
        topic, partition = where
        missing = sorted(part for part in entry.shares if part in named and part not in entry.named)
        if entry.commit is not None:
            yield from self._judge_commit(where, batch, entry)
        if missing and entry.aborted is not None:
            yield Torn(
                topic,
                partition,
                batch,
                entry.aborted.offset,
                f"aborted here, but parts {missing} were committed elsewhere",
            )
        elif missing and entry.commit is not None:
            yield Torn(
                topic, partition, batch, entry.commit.offset, f"parts {missing} were named by the commit but left out"
            )
        elif missing and last is not None and self._last_unit[topic] > last:
            offset = entry.shares[missing[0]].offset
            yield Torn(topic, partition, batch, offset, f"parts {missing} are undecided but committed elsewhere")

    def _judge_commit(self, where: TopicPartition, batch: str, entry: _PartitionBatch) -> Iterator[Torn]:
        assert entry.commit is not None
        unknown = entry.named - entry.shares.keys()
        if unknown and self._begins.get(where, 0) == 0:
            yield Torn(*where, batch, entry.commit.offset, f"parts {sorted(unknown)} were committed but never prepared")
        if unknown:
            return  # prepared before the first event
        shares = [entry.shares[part] for part in entry.named]
        most = sum(share.count for share in shares)
        least = most - (sum(share.identified for share in shares) if len(entry.named) > 1 else 0)
        if not least <= entry.committed <= most:
            yield Torn(
                *where,
                batch,
                entry.commit.offset,
                f"{entry.committed} messages were committed of {most} that were prepared",
            )
