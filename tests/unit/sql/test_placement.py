"""The shard of a topic. Stored messages depend on it, so the values are pinned."""

from __future__ import annotations

import pytest

from heapline.sql.placement import fnv32a, shard_of


@pytest.mark.parametrize(
    ("data", "value"),
    [(b"", 0x811C9DC5), (b"a", 0xE40C292C), (b"foobar", 0xBF9CF968), (b"hello", 0x4F9F2CAB)],
)
def test_fnv32a_has_the_published_values(data: bytes, value: int) -> None:
    assert fnv32a(data) == value


def test_shard_is_the_hash_of_namespace_and_name_modulo_the_count() -> None:
    assert shard_of("payments", "process-refund", 7) == fnv32a(b"paymentsprocess-refund") % 7
    assert [shard_of("default", f"topic-{i}", 4) for i in range(8)] == [0, 3, 2, 1, 0, 3, 2, 1]


def test_topics_are_spread_over_all_shards() -> None:
    counts = [0] * 5
    for i in range(1000):
        counts[shard_of("default", f"queue.{i}", 5)] += 1
    assert min(counts) > 100
