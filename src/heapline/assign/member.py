"""What one worker may hold now. Pure: documents, answers and time are passed in; decisions come back.

It holds a partition from just before the hook that adds it until the hook that removes it has succeeded, and never
when its lease is over by its own clock, whatever it hears. It believes the newest document it has seen and never goes
back to an older one. It confirms a version only when it holds nothing that this version does not grant it.
"""

from __future__ import annotations

from dataclasses import dataclass

from heapline.assign.document import Document
from heapline.assign.leases import Lease
from heapline.assign.model import Lifecycle, Partition


@dataclass(frozen=True, slots=True)
class Change:
    """What the next hook is told."""

    added: tuple[Partition, ...]
    removed: tuple[Partition, ...]


class Member:
    """One session of one worker. What an earlier session of this process (`former`) has not dropped yet, it drops."""

    def __init__(self, worker: str, session: str, ttl: float, former: Member | None = None) -> None:
        self.worker, self.session = worker, session
        self.lease = Lease(ttl)
        self.document: Document | None = None
        self.held: dict[Partition, int] = {}  # with fences
        self._leftover: set[Partition] = set() if former is None else former.undropped
        self._grants: dict[Partition, int] = {}
        # Those whose adding hook has succeeded.
        self._told: set[Partition] = set() if former is None else set(former._told)
        self._awaited = 0  # the version that a leader waits for us to confirm
        self._confirmed = 0
        self._closing = False
        self._lost = False

    # --- what happens

    def see(self, document: Document) -> bool:
        """A document was read; whether it is news."""
        if document.version <= self.version:
            return False
        self.document = document
        self._grants = document.grants(self.worker, self.session)
        self._awaited = document.waits_for(self.worker, self.session)
        return True

    def close(self) -> None:
        """It shall stop: from now on it wants nothing."""
        self._closing = True

    def lose(self) -> None:
        """Its session was ended by somebody else."""
        self._lost = True
        self.lease.lost()

    def begin(self, change: Change) -> None:
        """The hook is about to be called."""
        for partition in change.added:
            self.held[partition] = self._grants[partition]

    def finish(self, change: Change) -> tuple[int, int]:
        """The hook has succeeded; how many more it works on now, and how many fewer."""
        before = set(self._told)
        for partition in change.removed:
            self._leftover.discard(partition)
            self.held.pop(partition, None)
            self._told.discard(partition)
        self._told.update(partition for partition in change.added if partition in self.held)
        return len(self._told - before), len(before - self._told)

    # --- what follows

    @property
    def version(self) -> int:
        return 0 if self.document is None else self.document.version

    @property
    def lifecycle(self) -> Lifecycle:
        return Lifecycle.COLD_START if self.document is None else self.document.lifecycle

    @property
    def is_empty(self) -> bool:
        return not self.held and not self._leftover

    @property
    def is_member(self) -> bool:
        """Whether the document was made with this session in it."""
        return self.document is not None and self.document.members.get(self.worker) == self.session

    @property
    def undropped(self) -> set[Partition]:
        return self._leftover | self.held.keys()

    def next_change(self, now: float) -> Change | None:
        """What the next hook has to be told, if anything."""
        wanted = self._wanted(now)
        removed = self._leftover | {p for p, fence in self.held.items() if wanted.get(p) != fence}
        added = [p for p in wanted if p not in self._told and p not in removed]
        if not removed and not added:
            return None
        return Change(tuple(sorted(added)), tuple(sorted(removed)))

    def _wanted(self, now: float) -> dict[Partition, int]:
        if self._closing or self._lost or now >= self.lease.stops_at:
            return {}
        return self._grants

    def confirmable(self) -> int:
        """The version that may be confirmed. It never falls."""
        if not self._leftover and all(self._grants.get(p) == fence for p, fence in self.held.items()):
            self._confirmed = self.version
        return self._confirmed

    def is_awaited(self, written: int) -> bool:
        """Whether a leader waits for a confirmation that can be given now; `written` is the last one in our key."""
        return self._awaited > written and self.confirmable() >= self._awaited

    def holds(self, partition: Partition, now: float) -> bool:
        return partition in self.held and now < self.lease.ends_at

    def fence(self, partition: Partition, now: float) -> int | None:
        return self.held[partition] if self.holds(partition, now) else None
