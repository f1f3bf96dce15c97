"""Chunks of a replay: every offset is in exactly one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from heapline.spark.jobs.replay import sliced

SPANS = st.tuples(st.integers(0, 50), st.integers(0, 40)).map(lambda span: (span[0], sum(span)))


@given(st.dictionaries(st.integers(0, 4), SPANS, max_size=4), st.integers(1, 30))
def test_chunks_cover_every_offset_once_and_are_not_too_large(
    ranges: dict[int, tuple[int, int]], chunk_rows: int
) -> None:
    chunks = sliced(ranges, chunk_rows)
    found = [(int(p), offset) for chunk in chunks for p, span in chunk.items() for offset in range(*span)]
    assert sorted(found) == [(p, offset) for p in sorted(ranges) for offset in range(*ranges[p])]
    # Each partition's share is rounded separately.
    assert all(sum(last - first for first, last in c.values()) <= chunk_rows + len(ranges) for c in chunks)
    for earlier, later in itertools.pairwise(chunks):
        assert all(earlier[p][1] == later[p][0] for p in earlier)
