"""Guarantees of a worker pool, checked at all times and at the end of a run.

`SingleHolder`: no two workers hold a partition, as judged by each running worker on its own clock, and fences rise from
holder to holder. `SingleLeader`: each document follows its predecessor, epochs never fall, and each epoch has one
writer. `eventually_assigned`: after the faults, live workers hold everything, evenly. `affinity_kept`: partitions that
need not move stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

from heapline.assign.assignment import ASSIGNMENT_KEY, Document
from heapline.assign.kv import Entry
from heapline.assign.partitions import Partition


class Holder(Protocol):
    @property
    def name(self) -> str: ...

    def held(self) -> Mapping[Partition, int]:
        """Return the partitions that it holds now, with fences; nothing if it does not run."""
        ...


class SingleHolder:
    def __init__(self) -> None:
        self.complaints: list[str] = []
        self._fences: dict[Partition, tuple[int, str]] = {}

    def check_holders(self, holders: Iterable[Holder], at: float) -> None:
        taken: dict[Partition, str] = {}
        for holder in holders:
            for partition, fence in holder.held().items():
                if partition in taken:
                    both = f"{taken[partition]} and {holder.name}"
                    self.complaints.append(f"{at:.3f}: SingleHolder: {partition.id} is held by {both}")
                taken[partition] = holder.name
                self._fence(partition, fence, holder.name, at)

    def _fence(self, partition: Partition, fence: int, name: str, at: float) -> None:
        last, owner = self._fences.get(partition, (0, ""))
        if fence < last or (fence == last and owner != name):
            self.complaints.append(
                f"{at:.3f}: SingleHolder: {partition.id}: {name} holds it with fence {fence}, {owner} had {last}"
            )
        self._fences[partition] = (fence, name)


class SingleLeader:
    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.documents = 0
        self.epoch = 0
        self.version = 0
        self._writers: dict[int, str] = {}
        self.last: Document | None = None

    def written(self, entry: Entry, at: float) -> None:
        if entry.key != ASSIGNMENT_KEY:
            return
        document = Document.decode(entry.value)
        self.documents += 1
        if document.version != self.version + 1:
            self._complain(at, f"version {document.version} follows {self.version}")
        if document.epoch < self.epoch:
            self._complain(at, f"epoch {document.epoch} follows {self.epoch}")
        writer = self._writers.setdefault(document.epoch, document.writer)
        if writer != document.writer:
            self._complain(at, f"epoch {document.epoch} has two writers")
        self.version, self.epoch, self.last = document.version, document.epoch, document

    def _complain(self, at: float, what: str) -> None:
        self.complaints.append(f"{at:.3f}: SingleLeader: {what}")


def eventually_assigned(holders: Iterable[Holder], partitions: Iterable[Partition]) -> list[str]:
    """Return complaints about missing, extra and unevenly held partitions. All have weight 1 here."""
    complaints = []
    everything = set(partitions)
    shares = {holder.name: set(holder.held()) for holder in holders}
    if missing := everything - set().union(*shares.values()):
        complaints.append(f"EventuallyAssigned: no worker holds {', '.join(sorted(p.id for p in missing))}")
    if extra := set().union(*shares.values()) - everything:
        complaints.append(f"EventuallyAssigned: {', '.join(sorted(p.id for p in extra))} is no longer a partition")
    most = max((len(share) for share in shares.values()), default=0)
    fair = math.ceil(len(everything) / max(1, len(shares)) * 1.15)
    if most > fair + 1:
        sizes = {name: len(share) for name, share in shares.items()}
        complaints.append(f"EventuallyAssigned: a worker has {most}, not at most {fair + 1}: {sizes}")
    return complaints


def affinity_kept(before: Mapping[Partition, str], after: Mapping[Partition, str], share: float) -> list[str]:
    """Return a complaint if less than `share` of the partitions stayed. The maps give each partition's worker."""
    stayed = sum(after.get(partition) == worker for partition, worker in before.items())
    if before and stayed < share * len(before):
        return [f"AffinityKept: {stayed} of {len(before)} stayed in place, not {share:.0%}"]
    return []
