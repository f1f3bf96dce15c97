"""Messages between the spine and the partitions' publishers. Each may be lost, duplicated or late.

    spine → partition                               partition → spine
    OpenEpoch     I am the spine from now on        Publish       this is my head
    Acknowledge   this is the head I rely on        LeaseAnswer   these I leased; and this is my head
    Rebudget      this is your budget               Fenced        a newer spine than you is open
    LeaseRequest  lease up to n within the limit
    Cancel        lease nothing for that request

There is no "opened" and no "cancelled": a partition answers `OpenEpoch` and `Rebudget` with a publication, and confirms
a cancellation with an answer that holds no leases. Fewer kinds mean fewer possible orders of arrival.

A *place* is (key, id), the sort key of messages; smaller is better. NOTHING is worse than every place: it is the head
of an empty partition and the limit that limits nothing. Publications and requests are numbered upwards. A publication's
number holds the partition's boot count above its lowest 40 bits, so a restarted partition, which has forgotten what it
sent, continues with higher numbers.
"""

from __future__ import annotations

import msgspec

Place = tuple[int, int]

NOTHING: Place = (1 << 63, 0)
BOOT_BITS = 40


class OpenEpoch(msgspec.Struct, frozen=True, tag=True):
    epoch: int
    version: int
    budget: int


class Acknowledge(msgspec.Struct, frozen=True, tag=True):
    """The spine relies on the head of publication `number`; it never returns to an older one."""

    epoch: int
    number: int
    version: int
    budget: int


class Rebudget(msgspec.Struct, frozen=True, tag=True):
    epoch: int
    boot: int
    version: int
    budget: int


class LeaseRequest(msgspec.Struct, frozen=True, tag=True):
    """Lease up to n messages no worse than `limit`. `acknowledged` replaces an acknowledgment still in transit."""

    epoch: int
    boot: int
    number: int
    n: int
    limit: Place
    acknowledged: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    epoch: int
    number: int


class Publish(msgspec.Struct, frozen=True, tag=True):
    """The best of all messages that are or will be eligible at sending; `version` is that of the current budget."""

    epoch: int
    number: int
    head: Place
    version: int

    @property
    def boot(self) -> int:
        return self.number >> BOOT_BITS


class LeaseAnswer(msgspec.Struct, frozen=True, tag=True):
    request: int
    leased: tuple[Place, ...]
    publication: Publish


class Fenced(msgspec.Struct, frozen=True, tag=True):
    epoch: int


ToPartition = OpenEpoch | Acknowledge | Rebudget | LeaseRequest | Cancel
ToSpine = Publish | LeaseAnswer | Fenced
