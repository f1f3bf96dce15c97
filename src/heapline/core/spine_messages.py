"""What the spine and the partitions' publishers say to each other; every message may be lost, doubled, late.

    spine → partition                               partition → spine
    OpenEpoch     I am the spine from now on        Publish       this is my head
    Acknowledge   this is the head I reckon with    LeaseAnswer   these I leased; and this is my head
    Rebudget      this is your budget               Fenced        a newer spine than you is open
    LeaseRequest  lease up to n within the limit
    Cancel        lease nothing for that request

There is no "opened" and no "cancelled": a partition answers `OpenEpoch` and `Rebudget` with a publication, and
confirms a cancellation with an answer that holds no leases. Fewer kinds, fewer orders in which they can meet.

A *place* is (key, id): what messages are ordered by, smaller is better. NOTHING is worse than every place: the head
of an empty partition, the limit that limits nothing. Publications and requests are numbered upwards; a publication's
number holds the partition's boot count above its lowest 40 bits, so that a restarted partition, which has forgotten
what it sent, still numbers onwards.
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
    """The head that the spine reckons with is that of publication `number`; it never goes back to an older one."""

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
    """Lease up to n messages no worse than `limit`. `acknowledged` spares waiting for an acknowledgement on its way."""

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
    """The best of all that is or will be eligible when this is sent; `version` is of the budget in force then."""

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
