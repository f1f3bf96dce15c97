"""Decide which rows of a journal the lake lacks, and whether a commit continues the lake.

A commit adds rows [start, end) of partitions. It is valid if each start is the current end of the lake: then no row is
duplicated or skipped, with any number of writers and repetitions. Rows below the end exist already, so only the rest is
read. If the start is above the end, rows would be missing; this is rejected unless they are declared lost. Pure: knows
nothing of tables or Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from heapline.contract.errors import BadRequest, ConflictError
from heapline.spark.topic_log import DataLost, Ranges, share_out


class LakeMoved(ConflictError):
    """Another writer has committed some of these rows; read the end of the lake again and write the rest."""


class OtherIncarnation(BadRequest):
    """The lake's rows belong to a deleted topic; a new topic has the same name."""


class JournalBehind(BadRequest):
    """The journal ends before the lake does."""


@dataclass(frozen=True)
class Extent:
    """The rows of a topic in a table: all rows below these ends, from where the table began."""

    incarnation: int
    ends: Mapping[int, int]


@dataclass(frozen=True)
class Claim:
    """The rows that a commit adds for one topic: a range per partition, empty if there is nothing new.

    `lost` has rows before a range that the lake lacks and the journal no longer has.
    """

    incarnation: int
    ranges: Ranges
    lost: Ranges = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(end - start for start, end in self.ranges.values())

    @property
    def ends(self) -> dict[int, int]:
        return {partition: end for partition, (_, end) in self.ranges.items()}

    def up_to(self, ends: Mapping[int, int]) -> Claim:
        """Return the part of the claim below these ends; nothing for a partition without an end."""
        cut = {p: (start, max(start, min(end, ends.get(p, start)))) for p, (start, end) in self.ranges.items()}
        return Claim(self.incarnation, cut, self.lost)

    def limited(self, limit: int) -> Claim:
        """Return at most about `limit` rows of the claim, divided in proportion to the waiting rows."""
        starts, ends = ([r[i] for r in self.ranges.values()] for i in (0, 1))
        cut = zip(self.ranges, starts, share_out(limit, starts, ends), strict=True)
        return Claim(self.incarnation, {p: (start, end) for p, start, end in cut}, self.lost)


def claim_of(
    topic: str, extent: Extent | None, incarnation: int, journal: Ranges, *, fail_on_loss: bool = True
) -> Claim:
    """Return what the table lacks of the journal, whose rows are [start, end) per partition.

    Without an extent the table has nothing of the topic and begins where the journal does.

    >>> claim_of("jobs", Extent(1, {0: 10, 1: 20}), 1, {0: (5, 15), 1: (0, 20), 2: (0, 3)}).ranges
    {0: (10, 15), 1: (20, 20), 2: (0, 3)}
    """
    if extent is None:
        return Claim(incarnation, dict(journal))
    _check_incarnation(topic, extent, incarnation)
    ranges, lost = {}, {}
    for partition, (start, end) in journal.items():
        have = extent.ends.get(partition, 0)
        if end < have:
            raise JournalBehind(
                f"partition {partition} of topic {topic!r} ends at {end}, but the lake has its rows up to {have}; the "
                "journal may have been restored from a backup. Archive it to another lake, or remove its rows from "
                f"this one: heapline pipeline lake drop --topic {topic}"
            )
        if start > have:
            lost[partition] = (have, start)
        ranges[partition] = (max(start, have), end)
    if lost and fail_on_loss:
        raise _lost(topic, lost)
    return Claim(incarnation, ranges, lost)


def check_continues(topic: str, extent: Extent | None, claim: Claim) -> None:
    """Raise an error unless each range of the claim begins exactly at the table's end."""
    if extent is None:
        return
    _check_incarnation(topic, extent, claim.incarnation)
    gaps = {}
    for partition, (start, _) in claim.ranges.items():
        begins, until = claim.lost.get(partition, (start, start))
        have = extent.ends.get(partition, 0)
        if have > begins or until != start:
            raise LakeMoved(
                f"topic {topic!r}: the lake ends at {have} of partition {partition}, but the commit begins at {start}"
            )
        if have < begins:
            gaps[partition] = (have, begins)
    if gaps:
        raise _lost(topic, gaps)


def _check_incarnation(topic: str, extent: Extent, incarnation: int) -> None:
    if extent.incarnation != incarnation:
        raise OtherIncarnation(
            f"the lake has incarnation {extent.incarnation} of topic {topic!r}, and this is incarnation {incarnation}: "
            "the topic was deleted and created again, so its offsets mean other rows. Archive it to another lake, or "
            f"remove the old rows from this one: heapline pipeline lake drop --topic {topic}"
        )


def _lost(topic: str, lost: Ranges) -> DataLost:
    partition, (start, end) = next(iter(lost.items()))
    more = f", and of {len(lost) - 1} other partitions" if len(lost) > 1 else ""
    return DataLost(
        f"the lake ends at {start} of partition {partition} of topic {topic!r}, but the rows to archive begin at "
        f"{end}: rows {start} to {end - 1} are missing{more}. If they are lost for good, archive with --accept-loss "
        "(fail_on_loss=False): it continues after the gap, and the commit records it"
    )
