"""Rotations serve partitions fairly and deterministically."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest
from heapline.core.spine.strategy import Rotation, RoundRobin, Weighted, rotation

READY = st.dictionaries(st.integers(0, 9), st.integers(0, 20), max_size=6)


def test_round_robin_continues_after_the_partition_served_last() -> None:
    turns = RoundRobin()
    ready = {1: 9, 2: 9, 5: 9}
    assert turns.plan(ready, 4).order == [1, 2, 5, 1]
    assert turns.plan(ready, 1).order == [2]
    assert turns.plan({1: 9, 2: 9}, 3).order == [1, 2, 1]  # 5 has nothing: after 2 comes 1


def test_round_robin_skips_empty_partitions() -> None:
    assert RoundRobin().plan({1: 1, 2: 3, 3: 0}, 9).order == [1, 2, 2, 2]


def test_weighted_turns_are_spread() -> None:
    turns = Weighted({1: 3, 2: 1, 3: 1})
    assert turns.plan({1: 99, 2: 99, 3: 99}, 10).order == [1, 2, 1, 3, 1, 1, 2, 1, 3, 1]


@given(st.dictionaries(st.integers(0, 9), st.integers(1, 7), min_size=1, max_size=5), st.integers(1, 3))
def test_weighted_serves_each_partition_its_weight_per_round(weights: dict[int, int], rounds: int) -> None:
    turns = Weighted(weights)
    ready = dict.fromkeys(weights, 1000)
    for _ in range(rounds):
        assert turns.plan(ready, sum(weights.values())).counts() == weights


@given(st.dictionaries(st.integers(0, 4), st.integers(1, 7), min_size=2), st.lists(st.integers(1, 9), max_size=9))
def test_batches_take_the_same_turns_as_single_pops(weights: dict[int, int], wants: list[int]) -> None:
    ready = dict.fromkeys(weights, 1000)
    for batches, singles in ((RoundRobin(), RoundRobin()), (Weighted(weights), Weighted(weights))):
        for want in wants:
            assert batches.plan(ready, want).order == [singles.plan(ready, 1).order[0] for _ in range(want)]


@pytest.mark.parametrize("kind", [RoundRobin, Weighted])
@given(plans=st.lists(st.tuples(READY, st.integers(0, 30)), max_size=5))
def test_plan_takes_as_many_as_wanted_or_available(
    kind: type[Rotation], plans: list[tuple[dict[int, int], int]]
) -> None:
    turns = kind()
    for ready, want in plans:
        plan = turns.plan(ready, want)
        assert len(plan.order) == min(want, sum(ready.values()))
        assert not Counter(plan.order) - Counter(ready)


def test_empty_partition_earns_no_credit() -> None:
    turns = Weighted({1: 1, 2: 1})
    turns.plan({1: 100}, 100)
    assert turns.plan({1: 100, 2: 100}, 10).counts() == {1: 5, 2: 5}


def test_best_first_needs_no_rotation() -> None:
    assert rotation("best_first") is None
    assert isinstance(rotation("weighted", {1: 2.0}), Weighted)


@pytest.mark.parametrize(
    "call",
    [
        lambda: rotation("worst_first"),  # type: ignore[arg-type]
        lambda: Weighted({1: -1}),
    ],
)
def test_invalid_settings_are_rejected(call: object) -> None:
    with pytest.raises(BadRequest):
        call()  # type: ignore[operator]
