"""What a lake has of a topic, and what part of a journal it lacks: the rule that makes a commit fit.

A commit brings rows [start, end) of partitions. It fits if each start is where the lake ends: then nothing is in it
twice and nothing is left out, whoever commits and however often. Below the end, rows are there already, and only the
rest is to be read; above it rows would be missing, which is refused unless it is said that they are lost. Pure: knows
nothing of tables or Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from heapline.errors import BadRequest, ConflictError
from heapline.spark.log import DataLost
from heapline.spark.marks import share_out

Range = dict[int, tuple[int, int]]


class LakeMoved(ConflictError):
    """Somebody else has committed some of these rows meanwhile: look how far the lake goes, and bring the rest."""


class OtherIncarnation(BadRequest):
    """The lake's rows are of a topic that was deleted since; another has its name."""


class JournalBehind(BadRequest):
    """The journal ends before the lake does."""


@dataclass(frozen=True)
class Kept:
    """What a table has of a topic: all rows below these ends, from where it began."""

    incarnation: int
    ends: Mapping[int, int]


@dataclass(frozen=True)
class Claim:
    """What a commit brings of one topic: a range of each of its partitions, empty where there is nothing new.

    `lost`: rows up to a range's start that the lake lacks and no journal has any more.
    """

    incarnation: int
    ranges: Range
    lost: Range = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(end - start for start, end in self.ranges.values())

    @property
    def ends(self) -> dict[int, int]:
        return {partition: end for partition, (_, end) in self.ranges.items()}

    def up_to(self, ends: Mapping[int, int]) -> Claim:
        """Of it what lies below these ends; nothing of a partition that has none."""
        cut = {p: (start, max(start, min(end, ends.get(p, start)))) for p, (start, end) in self.ranges.items()}
        return Claim(self.incarnation, cut, self.lost)

    def limited(self, limit: int) -> Claim:
        """At most about so many rows of it, from its start: each partition by its share of what waits."""
        starts, ends = ([r[i] for r in self.ranges.values()] for i in (0, 1))
        cut = zip(self.ranges, starts, share_out(limit, starts, ends), strict=True)
        return Claim(self.incarnation, {p: (start, end) for p, start, end in cut}, self.lost)


def claim_of(topic: str, kept: Kept | None, incarnation: int, journal: Range, *, fail_on_loss: bool = True) -> Claim:
    """What the table lacks of what the journal has, [start, end) of each partition. Without `kept` the table has
    nothing of the topic, and begins where the journal does.

    >>> claim_of("jobs", Kept(1, {0: 10, 1: 20}), 1, {0: (5, 15), 1: (0, 20), 2: (0, 3)}).ranges
    {0: (10, 15), 1: (20, 20), 2: (0, 3)}
    """
    if kept is None:
        return Claim(incarnation, dict(journal))
    _check_incarnation(topic, kept, incarnation)
    ranges, lost = {}, {}
    for partition, (start, end) in journal.items():
        have = kept.ends.get(partition, 0)
        if end < have:
            raise JournalBehind(
                f"partition {partition} of topic {topic!r} ends at {end}, but the lake has rows up to {have} of it: "
                "was the journal restored from a backup? Archive it to another lake, or remove its rows from this one: "
                f"heapline pipeline lake drop --topic {topic}"
            )
        if start > have:
            lost[partition] = (have, start)
        ranges[partition] = (max(start, have), end)
    if lost and fail_on_loss:
        raise _lost(topic, lost)
    return Claim(incarnation, ranges, lost)


def check_fits(topic: str, kept: Kept | None, claim: Claim) -> None:
    """Raises unless the table's end is exactly where each of these ranges begins."""
    if kept is None:
        return
    _check_incarnation(topic, kept, claim.incarnation)
    gaps = {}
    for partition, (start, _) in claim.ranges.items():
        begins, told = claim.lost.get(partition, (start, start))
        have = kept.ends.get(partition, 0)
        if have > begins or told != start:
            raise LakeMoved(
                f"topic {topic!r}: the lake ends at {have} of partition {partition}, this begins at {start}"
            )
        if have < begins:
            gaps[partition] = (have, begins)
    if gaps:
        raise _lost(topic, gaps)


def _check_incarnation(topic: str, kept: Kept, incarnation: int) -> None:
    if kept.incarnation != incarnation:
        raise OtherIncarnation(
            f"the lake holds topic {topic!r} of incarnation {kept.incarnation}, and this is incarnation {incarnation}: "
            "it was deleted and made again, so its offsets mean other rows. Archive it to another lake, or remove the "
            f"old rows from this one: heapline pipeline lake drop --topic {topic}"
        )


def _lost(topic: str, lost: Range) -> DataLost:
    partition, (start, end) = next(iter(lost.items()))
    more = f", and of {len(lost) - 1} other partitions" if len(lost) > 1 else ""
    return DataLost(
        f"the lake ends at {start} of partition {partition} of topic {topic!r}, but what there is to archive begins at "
        f"{end}: rows {start} to {end - 1} are missing{more}. If they are lost for good, archive with --accept-loss "
        "(fail_on_loss=False): it goes on behind the gap, and the commit says so"
    )
