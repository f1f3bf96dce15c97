"""Whether prepared batches came whole or not at all, from the events of their parts.

A part has a share in each partition that it reaches, also of several topics. A commit names parts: each of their shares
must come, with all its messages (those that repeat the identity of another part's message are left out, and only
such), and nothing else of the batch may. A share that is still undecided is no fault while the commit may be under way:
a topic carries a decision out before it serves anybody, so once its log goes on behind the commit, it is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from heapline.spark.jobs.auditing.marks import Mark, Reach

Place = tuple[str, int]  # topic, partition


class Torn(NamedTuple):
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
class _Held:
    """One batch in one partition, from its first part to its decision."""

    shares: dict[str, _Share] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    came: int = 0
    commit: Mark | None = None
    aborted: Mark | None = None


class BatchBook:
    def __init__(self, marks: Sequence[Mark], reaches: Sequence[Reach]) -> None:
        self._begins = {(reach.topic, reach.partition): reach.first for reach in reaches}
        self._last_unit: dict[str, int] = {}
        for reach in reaches:
            self._last_unit[reach.topic] = max(reach.last_unit, self._last_unit.get(reach.topic, 0))
        self._open: dict[tuple[Place, str], _Held] = {}
        self._done: list[tuple[Place, str, _Held]] = []
        for mark in sorted(marks, key=lambda m: (m.topic, m.partition, m.offset)):
            if mark.kind.startswith("batch_"):
                self._read(mark)
        self._all = self._done + [(place, batch, held) for (place, batch), held in self._open.items()]
        self.count = len({batch for _, batch, _ in self._all})

    def _read(self, mark: Mark) -> None:
        place, batch = (mark.topic, mark.partition), mark.batch_id or ""
        held = self._open.setdefault((place, batch), _Held())
        said = mark.said()
        if mark.kind == "batch_prepared":
            ids = (said["first_id"], said["last_id"]) if "first_id" in said else None
            held.shares[said["part"]] = _Share(said["part"], mark.messages, said.get("identified", 0), mark.offset, ids)
            return
        if mark.kind == "batch_aborted":
            held.aborted = mark
        else:
            held.named |= set(said["parts"])
            held.came += mark.named
            held.commit = mark
            if said["more"]:
                return
        self._done.append((place, batch, self._open.pop((place, batch))))

    def hidden(self, topic: str) -> dict[int, tuple[tuple[int, int], ...]]:
        """By partition: the ids of shares that were not committed."""
        found: dict[int, list[tuple[int, int]]] = {}
        for (name, partition), _, held in self._all:
            if name == topic:
                ranges = (s.ids for s in held.shares.values() if s.part not in held.named and s.ids is not None)
                found.setdefault(partition, []).extend(ranges)
        return {partition: tuple(ranges) for partition, ranges in found.items() if ranges}

    def torn(self) -> Iterator[Torn]:
        named: dict[str, set[str]] = {}
        last: dict[tuple[str, str], int] = {}  # (topic, batch) -> unit of the last commit
        for (topic, _), batch, held in self._all:
            if held.commit is not None:
                named.setdefault(batch, set()).update(held.named)
                last[topic, batch] = max(held.commit.unit, last.get((topic, batch), 0))
        for place, batch, held in self._all:
            yield from self._judge(place, batch, held, named.get(batch, set()), last.get((place[0], batch)))

    def _judge(self, place: Place, batch: str, held: _Held, named: set[str], last: int | None) -> Iterator[Torn]:
        topic, partition = place
        lacking = sorted(part for part in held.shares if part in named and part not in held.named)
        if held.commit is not None:
            yield from self._judge_commit(place, batch, held)
        if lacking and held.aborted is not None:
            yield Torn(topic, partition, batch, held.aborted.offset, f"aborted here, though parts {lacking} are in")
        elif lacking and held.commit is not None:
            yield Torn(topic, partition, batch, held.commit.offset, f"parts {lacking} were left out, though named")
        elif lacking and last is not None and self._last_unit[topic] > last:
            offset = held.shares[lacking[0]].offset
            yield Torn(topic, partition, batch, offset, f"parts {lacking} are undecided, though committed elsewhere")

    def _judge_commit(self, place: Place, batch: str, held: _Held) -> Iterator[Torn]:
        assert held.commit is not None
        unknown = held.named - held.shares.keys()
        if unknown and self._begins.get(place, 0) == 0:
            yield Torn(*place, batch, held.commit.offset, f"parts {sorted(unknown)} came that were never prepared")
        if unknown:
            return  # prepared before the events begin
        shares = [held.shares[part] for part in held.named]
        most = sum(share.count for share in shares)
        least = most - (sum(share.identified for share in shares) if len(held.named) > 1 else 0)
        if not least <= held.came <= most:
            yield Torn(*place, batch, held.commit.offset, f"{held.came} messages came of {most} that were prepared")
