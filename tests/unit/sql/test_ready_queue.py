"""Entries of the ready queue sort like the messages, and a topic's settings limit their number."""

from __future__ import annotations

import random

from heapline.contract.config import make_config
from heapline.contract.fields import INT64_MAX, INT64_MIN
from heapline.sql.layout import START, Place
from heapline.sql.ready_queue import DEPTH_MAX, depth_of, pack_place, unpack_place


def test_entries_sort_like_positions() -> None:
    rng, corners = random.Random(3), [INT64_MIN, -1, 0, 1, INT64_MAX]
    places = [START, *(Place(*(rng.choice(corners) for _ in range(3))) for _ in range(500))]
    assert [unpack_place(pack_place(place)) for place in places] == places
    assert [unpack_place(entry) for entry in sorted(map(pack_place, places))] == sorted(places)


def test_depth_is_less_than_k_and_none_where_pops_are_strict_or_limited() -> None:
    depths = {k: depth_of(make_config({"k": k})) for k in (1, 2, 100, 100_000)}
    assert depths == {1: 0, 2: 1, 100: 99, 100_000: DEPTH_MAX}
    assert depth_of(make_config({"k": 100, "max_inflight": 5})) == 0
