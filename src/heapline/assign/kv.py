"""What `heapline.assign` needs of a key-value store: compare-and-set by revision, and little else.

**What must hold.** A revision is a number that rises with every write of the store (of any key) and is never used
twice. `create` and `update` are atomic, and see the newest state. That is all the safety there is: everything below
may fail in any way.

**What need not hold.** `get` and `entries` may answer from the past (NATS: 17 s), `watch` may lose events and stand
still (NATS: 18 s), a key's ttl may end late. So nobody ends a lease, leads, or holds a partition because of what he
read; he writes by compare-and-set, or waits for time to pass by his own clock.

**Outcomes.** `Conflict`: the write was not carried out, and never will be. `ConnectionLost`: unknown; it may have been
carried out, or may be yet.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import NamedTuple, Protocol

from heapline.assign.errors import AssignError
from heapline.errors import ConflictError


class Entry(NamedTuple):
    key: str
    value: bytes
    revision: int


class Conflict(AssignError, ConflictError):
    """A compare-and-set found another revision than the expected one. The key's state did not change."""

    fields = ("key",)

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"{key!r} is at another revision than expected: read it and decide anew")


class KV(Protocol):
    """Keys are tokens with dots between them, of the letters A-Z a-z 0-9 _ -. A ttl is in seconds and belongs to
    the write that brings it: the key goes away when that much time has passed without another write."""

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        """Write a key that is not there (never was, was deleted, or its ttl ended), and give its revision. Else
        Conflict."""
        ...

    async def update(self, key: str, value: bytes, revision: int, *, ttl: float | None = None) -> int:
        """Write a key that stands at exactly this revision, and give the new one. Else Conflict; a key that is gone
        conflicts with every revision."""
        ...

    async def delete(self, key: str, revision: int) -> None:
        """Remove a key that stands at exactly this revision. Else Conflict."""
        ...

    async def get(self, key: str) -> Entry | None:
        """The key as it is, or was a while ago; None if it is or was not there."""
        ...

    async def entries(self, prefix: str) -> list[Entry]:
        """All keys that begin with the prefix, each as it is or was. A prefix is empty, a key, or ends with a dot."""
        ...

    def watch(self, prefix: str) -> AsyncGenerator[Entry | None, None]:
        """What is written under a prefix from now on: an entry, or None for "something changed, look" (a key went
        away, or events may have been lost). A hint: events may be late, merged or missing. It ends by raising
        ConnectionLost, or when its iterator is closed."""
        ...
