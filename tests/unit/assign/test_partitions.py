"""Partitions are named by keys that can be subjects, and are equal if their keys are."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heapline import assign
from heapline.assign.assignment import Assignment, Lifecycle
from heapline.assign.errors import BadPartition
from heapline.assign.partitions import WEIGHT_MAX, Partition, distinct
from heapline.assign.states import State


def test_subject_joins_prefix_keys_and_suffix() -> None:
    partition = Partition(("tool001", "chamber1"))
    assert partition.subject("work") == "work.tool001.chamber1"
    assert partition.subject("work.eu", "completed") == "work.eu.tool001.chamber1.completed"
    assert partition.subject() == partition.id == "tool001.chamber1"


def test_partitions_are_equal_whatever_their_weights() -> None:
    light, heavy = Partition(("a", "b"), 1), Partition(["a", "b"], 9)  # type: ignore[arg-type]
    assert light == heavy
    assert hash(light) == hash(heavy)
    assert light != "a.b"
    assert {light: "held"}[heavy] == "held"


def test_single_key_may_be_a_string() -> None:
    assert Partition("abc") == Partition(("abc",))  # type: ignore[arg-type]


def test_partition_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(Partition(("tööl", "部屋"), 7)))
    assert (again.keys, again.weight, again.id) == (("tööl", "部屋"), 7, "tööl.部屋")


@pytest.mark.parametrize(
    "keys",
    [(), ("",), ("a", ""), ("a.b",), ("*",), (">",), ("a b",), ("a\n",), ("a\u00a0b",), ("\ud800",), (1,), ("\0",)],
)
def test_keys_that_cannot_be_a_subject_are_rejected(keys: tuple[object, ...]) -> None:
    with pytest.raises(BadPartition, match="key"):
        Partition(keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [-1, 1.5, True, "1", None, WEIGHT_MAX + 1])
def test_invalid_weight_is_rejected(weight: object) -> None:
    with pytest.raises(BadPartition, match=r"partition 'a' has weight"):
        Partition(("a",), weight)  # type: ignore[arg-type]


KEYS = st.lists(st.sampled_from(["", "a", "b", "a.b", "b.a", "é", ".", "a-b"]), max_size=3)


@given(KEYS, KEYS)
@settings(max_examples=200)
def test_different_keys_never_have_the_same_id(left: list[str], right: list[str]) -> None:
    try:
        one, other = Partition(tuple(left)), Partition(tuple(right))
    except BadPartition:
        return
    assert (one == other) == (left == right)


def test_distinct_sorts_and_rejects_duplicates() -> None:
    a, b = Partition(("a",)), Partition(("b",))
    assert distinct([b, a]) == (a, b)
    assert sorted([b, a]) == [a, b]
    with pytest.raises(BadPartition, match="'a' is listed twice"):
        distinct([a, b, Partition(("a",), 5)])


def test_assignment_returns_the_fence_of_each_partition() -> None:
    a = Partition(("a",))
    assert Assignment(7, Lifecycle.STABLE, (a,), {"a": 5}).fence(a) == 5
    assert Assignment() == Assignment(0, Lifecycle.COLD_START, (), {})


def test_states_have_the_numbers_of_the_metric() -> None:
    assert [state.value for state in State] == list(range(9))
    assert [lifecycle.value for lifecycle in Lifecycle] == ["cold_start", "post_cold_start", "stable"]


def test_all_public_names_exist() -> None:
    assert len(assign.__all__) == len(set(assign.__all__))
    assert all(hasattr(assign, name) for name in assign.__all__)
