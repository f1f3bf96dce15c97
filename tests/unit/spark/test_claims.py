"""The rows that a lake lacks, compared with a lake that is a plain set of rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.spark.lake.claims import (
    Claim,
    Extent,
    JournalBehind,
    LakeMoved,
    OtherIncarnation,
    check_continues,
    claim_of,
)
from heapline.spark.topic_log import DataLost

PLACES = st.integers(0, 12)
RANGES = st.tuples(PLACES, PLACES).map(sorted).map(tuple)
JOURNALS = st.dictionaries(st.integers(0, 2), RANGES, min_size=1)


def rows_of(ranges: dict[int, tuple[int, int]]) -> set[tuple[int, int]]:
    return {(p, offset) for p, (start, end) in ranges.items() for offset in range(start, end)}


class PlainLake:
    """Return the rows as a set, and the end of the claim."""

    def __init__(self) -> None:
        self.kept: Extent | None = None
        self.rows: list[tuple[int, int]] = []

    def commit(self, claim: Claim) -> None:
        check_continues("jobs", self.kept, claim)
        self.rows += sorted(rows_of(claim.ranges))
        before = {} if self.kept is None else self.kept.ends
        self.kept = Extent(claim.incarnation, {**before, **claim.ends})


@given(st.lists(st.tuples(st.dictionaries(st.integers(0, 2), PLACES), st.integers(1, 9)), max_size=8), st.data())
def test_repeated_and_killed_archives_add_every_row_once(
    rounds: list[tuple[dict[int, int], int]], data: st.DataObject
) -> None:
    lake, ends = PlainLake(), {0: 0, 1: 0, 2: 0}
    old: list[Claim] = []
    for grown, limit in rounds:
        ends = {p: end + grown.get(p, 0) for p, end in ends.items()}
        claim = claim_of("jobs", lake.kept, 1, {p: (0, end) for p, end in ends.items()}).limited(limit)
        assert claim.rows <= limit
        old.append(claim)
        for tried in data.draw(st.lists(st.sampled_from(old), max_size=3)):  # zombies and replays, before or after
            try:
                lake.commit(tried)
            except (LakeMoved, DataLost):
                assert lake.kept is not None
    while (claim := claim_of("jobs", lake.kept, 1, {p: (0, end) for p, end in ends.items()})).rows:
        lake.commit(claim)
    assert sorted(lake.rows) == sorted(rows_of({p: (0, end) for p, end in ends.items()}))


@given(st.dictionaries(st.integers(0, 2), PLACES), JOURNALS, st.booleans())
def test_claim_is_the_missing_range_and_a_gap_is_rejected_or_recorded(
    ends: dict[int, int], journal: dict[int, tuple[int, int]], fail: bool
) -> None:
    have = {(p, offset) for p, end in ends.items() for offset in range(end)}
    gone = {(p, offset) for p, (start, _) in journal.items() for offset in range(start)} - have
    behind = any(end < ends.get(p, 0) for p, (_, end) in journal.items())
    try:
        claim = claim_of("jobs", Extent(1, ends), 1, journal, fail_on_loss=fail)
    except JournalBehind:
        assert behind
    except DataLost:
        assert gone
        assert fail
    else:
        assert not behind
        assert rows_of(claim.lost) == gone
        assert rows_of(claim.ranges) == rows_of(journal) - have
        assert claim.ranges.keys() == journal.keys()
        check_continues("jobs", Extent(1, ends), claim)


def test_overlapping_commit_is_rejected_and_so_is_one_with_a_gap() -> None:
    kept = Extent(1, {0: 10})
    with pytest.raises(LakeMoved):
        check_continues("jobs", kept, Claim(1, {0: (5, 15)}))
    assert claim_of("jobs", kept, 1, {0: (5, 15)}).ranges == {0: (10, 15)}
    with pytest.raises(DataLost, match=r"rows 10 to 11 are missing.*--accept-loss"):
        check_continues("jobs", kept, Claim(1, {0: (12, 15)}))
    with pytest.raises(LakeMoved):
        check_continues("jobs", kept, Claim(1, {0: (12, 15)}, lost={0: (10, 11)}))  # lost rows must reach the start


def test_recreated_topic_is_not_mistaken_for_the_old_one() -> None:
    with pytest.raises(OtherIncarnation, match="lake drop --topic jobs"):
        claim_of("jobs", Extent(1, {0: 10}), 2, {0: (0, 15)})
    with pytest.raises(OtherIncarnation):
        check_continues("jobs", Extent(1, {0: 10}), Claim(2, {0: (10, 15)}))


def test_claim_up_to_a_goal_excludes_later_rows_and_partitions() -> None:
    claim = Claim(1, {0: (5, 20), 1: (5, 20), 2: (0, 4)})
    assert claim.up_to({0: 10, 1: 3}).ranges == {0: (5, 10), 1: (5, 5), 2: (0, 0)}
