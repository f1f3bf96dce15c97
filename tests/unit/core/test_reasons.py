"""Groups of reasons: what counts as the same, and that their number is bounded."""

from __future__ import annotations

import pytest

from heapline.core.reasons import GROUPS_MAX, OTHERS, REASON_MAX, SAMPLES, ReasonTally, name_of


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("ValueError: 17 is not 4", "ValueError: # is not #"),
        ("gone at 0xDEADbeef", "gone at #"),
        ("no 01890f6e-1b2c-7def-8123-0123456789ab here", "no # here"),
        ("no 01JGXV0Z000000G7M9QK2V4T8B", "no #"),
        ("Traceback\n  File\n  KeyError: 'x'\n", "KeyError: 'x'"),
        ("", ""),
        ("x" * 5000, "x" * REASON_MAX),
    ],
)
def test_name_of_a_reason(reason: str, name: str) -> None:
    assert name_of(reason) == name


def test_match_is_in_every_reason_of_its_group() -> None:
    tally = ReasonTally()
    reasons = [f"{n}: order {n} of {n * 7} failed: code #{n}" for n in range(20)]
    tally.add(reasons, range(20), range(20))
    (group,) = tally.largest(10)
    assert group.match is not None
    assert all(group.match in reason for reason in reasons)
    assert (group.count, group.first_at, group.last_at, group.example) == (20, 0, 19, reasons[-1])
    assert group.ids == list(range(20 - SAMPLES, 20))


def test_reason_of_numbers_alone_has_no_match() -> None:
    tally = ReasonTally()
    tally.add(["404", "500", ""], [1, 2, 3], [1, 2, 3])
    assert [(group.reason, group.count, group.match) for group in tally.largest(5)] == [("#", 2, None), ("", 1, None)]


def test_number_of_groups_is_bounded_and_none_is_lost() -> None:
    tally = ReasonTally()
    names = ["".join(chr(97 + n // 26**k % 26) for k in range(4)) for n in range(GROUPS_MAX + 50)]
    tally.add(names, [1] * len(names), range(len(names)))
    groups = tally.largest(GROUPS_MAX + 50)
    assert len(groups) == GROUPS_MAX + 1
    assert (groups[0].reason, groups[0].count, groups[0].match) == (OTHERS, 50, None)
    assert sum(group.count for group in groups) == tally.count
