"""The lease count per holder always equals a count of the leases."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.core.events import Grant
from heapline.core.leases import HOLDER, LeaseTable

pytestmark = pytest.mark.usefixtures("both_accelerators")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.sampled_from([None, "a", "b"]), st.integers(1, 5)),
        st.tuples(st.just("take"), st.lists(st.integers(0, 1 << 30), max_size=6)),
        st.tuples(st.just("extend"), st.integers(0, 1 << 30)),
        st.tuples(st.just("freeze")),
    ),
    max_size=40,
)


@given(STEPS)
def test_lease_count_per_holder_matches_the_leases(steps: list[tuple[object, ...]]) -> None:
    table, next_id = LeaseTable(), 1
    for step in steps:
        ids = sorted(table.by_id)
        match step:
            case ("grant", holder, int(count)):
                new = list(range(next_id, next_id + count))
                next_id += count
                table.grant(new, new[0], [0] * count, [0] * count, Grant(count, 100, holder, None), 0)  # type: ignore[arg-type]
            case ("take", list(picks)) if ids:
                table.take({ids[pick % len(ids)] for pick in picks})
            case ("extend", int(pick)) if ids:
                table.extend([ids[pick % len(ids)]], [200])
            case ("freeze",):
                table = LeaseTable.from_state(table.to_state())
        holders = [lease[HOLDER] for lease in table.by_id.values() if lease[HOLDER] is not None]
        assert table.held == Counter(holders)
