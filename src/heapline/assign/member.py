"""Decide what one worker may hold now. Pure: documents, results and time are passed in.

A worker holds a partition from just before the hook that adds it until the hook that removes it has succeeded, and
never after its lease has ended on its own clock. It follows the newest document it has seen and never returns to an
older one. It confirms a version only when it holds nothing that this version does not grant.
"""

from __future__ import annotations

from dataclasses import dataclass

from heapline.assign.assignment import Document, Lifecycle
from heapline.assign.leases import Lease
from heapline.assign.partitions import Partition


@dataclass(frozen=True, slots=True)
class Change:
    """The arguments of the next assignment hook."""

    added: tuple[Partition, ...]
    removed: tuple[Partition, ...]


class Member:
    """One session of one worker.

    It also drops what an earlier session of this process (`former`) has not dropped yet.
    """

    def __init__(self, worker: str, session: str, ttl: float, former: Member | None = None) -> None:
        self.worker, self.session = worker, session
        self.lease = Lease(ttl)
        self.document: Document | None = None
        self.held: dict[Partition, int] = {}  # partition: fence; replaced, never changed: other threads read it
        self._leftover: set[Partition] = set() if former is None else former.undropped
        self._grants: dict[Partition, int] = {}
        # Partitions whose adding hook has succeeded.
        self._active: set[Partition] = set() if former is None else set(former._active)
        self._awaited = 0  # the version that a leader waits for this session to confirm
        self._confirmed = 0
        self._closing = False
        self._lost = False

    # --- events

    def observe(self, document: Document) -> bool:
        """Note a document that was read. Return whether it is newer."""
        if document.version <= self.version:
            return False
        self.document = document
        self._grants = document.grants(self.worker, self.session)
        self._awaited = document.waits_for(self.worker, self.session)
        return True

    def close(self) -> None:
        """Begin to stop: from now on the member wants no partitions."""
        self._closing = True

    def lose(self) -> None:
        """Note that another process ended this session."""
        self._lost = True
        self.lease.lost()

    def begin(self, change: Change) -> None:
        """Note that the hook is about to be called."""
        self.held = self.held | {partition: self._grants[partition] for partition in change.added}

    def finish(self, change: Change) -> tuple[int, int]:
        """Note that the hook succeeded. Return how many partitions it works on more, and how many fewer."""
        before, removed = set(self._active), set(change.removed)
        self._leftover.difference_update(removed)
        self.held = {partition: fence for partition, fence in self.held.items() if partition not in removed}
        self._active.difference_update(removed)
        self._active.update(partition for partition in change.added if partition in self.held)
        return len(self._active - before), len(before - self._active)

    # --- conclusions

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
        """Whether the document includes this session."""
        return self.document is not None and self.document.members.get(self.worker) == self.session

    @property
    def undropped(self) -> set[Partition]:
        return self._leftover | self.held.keys()

    def next_change(self, now: float) -> Change | None:
        """Return the change for the next hook call, or None."""
        wanted = self._wanted(now)
        removed = self._leftover | {p for p, fence in self.held.items() if wanted.get(p) != fence}
        added = [p for p in wanted if p not in self._active and p not in removed]
        if not removed and not added:
            return None
        return Change(tuple(sorted(added)), tuple(sorted(removed)))

    def _wanted(self, now: float) -> dict[Partition, int]:
        if self._closing or self._lost or now >= self.lease.stops_at:
            return {}
        return self._grants

    def confirmable(self) -> int:
        """Return the version that may be confirmed. It never falls."""
        if not self._leftover and all(self._grants.get(p) == fence for p, fence in self.held.items()):
            self._confirmed = self.version
        return self._confirmed

    def is_awaited(self, written: int) -> bool:
        """Return whether a leader waits for a confirmation that can be given now. `written` is the last one written."""
        return self._awaited > written and self.confirmable() >= self._awaited

    def held_at(self, now: float) -> dict[Partition, int]:
        """Return what is held then. The result never changes."""
        return self.held if now < self.lease.ends_at else {}

    def holds(self, partition: Partition, now: float) -> bool:
        return partition in self.held_at(now)

    def fence(self, partition: Partition, now: float) -> int | None:
        return self.held_at(now).get(partition)
