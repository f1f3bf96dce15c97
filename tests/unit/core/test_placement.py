import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest
from heapline.core.ids import PARTITIONS_MAX
from heapline.core.placement import place

KEYS = [b"key-%d" % i for i in range(20_000)]


def test_golden_placement_never_changes() -> None:
    """Locations on disk depends on these values: if this fails, the change is wrong, not the test."""
    keys = [b"", b"a", b"user:1", b"user:2", "Zürich".encode(), b"\x00" * 40]
    golden = {
        2: [0, 0, 1, 1, 0, 0],
        3: [2, 0, 1, 1, 0, 0],
        16: [2, 0, 8, 3, 11, 9],
        100: [55, 79, 75, 24, 65, 39],
        1024: [720, 513, 75, 952, 65, 669],
    }
    assert {n: place(keys, n).tolist() for n in golden} == golden


@pytest.mark.parametrize("partitions", [1, 2, 7, 31])
def test_growing_moves_keys_only_to_the_new_partition_and_only_its_share(partitions: int) -> None:
    before, after = place(KEYS, partitions), place(KEYS, partitions + 1)
    moved = before != after
    assert (after[moved] == partitions).all()
    share = len(KEYS) / (partitions + 1)
    assert abs(moved.sum() - share) < 5 * np.sqrt(share)


@given(st.lists(st.binary(max_size=20), max_size=20), st.integers(1, PARTITIONS_MAX), st.integers(1, PARTITIONS_MAX))
def test_key_that_moves_when_a_topic_grows_moves_to_a_new_partition(keys: list[bytes], one: int, other: int) -> None:
    few, many = sorted((one, other))
    before, after = place(keys, few), place(keys, many)
    assert all(b == a or a >= few for b, a in zip(before.tolist(), after.tolist(), strict=True))


def test_growing_by_many_equals_growing_one_by_one() -> None:
    """The location of a key depends on the number of partitions, not on how it was reached; its share moves."""
    before, after = place(KEYS, 4), place(KEYS, 10)
    share = len(KEYS) * 6 / 10
    assert abs(int((before != after).sum()) - share) < 5 * np.sqrt(share)
    counts = np.bincount(after, minlength=10)
    assert (abs(counts - len(KEYS) / 10) < 5 * np.sqrt(len(KEYS) / 10)).all()


@pytest.mark.parametrize("partitions", [2, 16, 100])
def test_keys_spread_evenly(partitions: int) -> None:
    counts = np.bincount(place(KEYS, partitions), minlength=partitions)
    share = len(KEYS) / partitions
    assert (abs(counts - share) < 5 * np.sqrt(share)).all()


@given(st.lists(st.binary(max_size=20), max_size=40), st.integers(1, PARTITIONS_MAX))
def test_batch_places_each_key_like_a_single_one_and_in_range(keys: list[bytes], partitions: int) -> None:
    placed = place(keys, partitions)
    assert placed.tolist() == [place([key], partitions).item() for key in keys]
    assert all(0 <= p < partitions for p in placed.tolist())


@pytest.mark.parametrize("partitions", [0, -1, PARTITIONS_MAX + 1])
def test_impossible_partition_count_is_refused(partitions: int) -> None:
    with pytest.raises(BadRequest):
        place([b"a"], partitions)
