"""Turns are fair and deterministic; a candidate too old is asked for again, one too young is left to ripen."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest
from heapline.core.spine.index import SpineIndex
from heapline.core.spine.strategy import (
    Ages,
    Eligible,
    Refresh,
    Rotation,
    RoundRobin,
    Take,
    Wait,
    Weighted,
    bound_in_force,
    choose_best,
    eligible_partitions,
    rotation,
)

READY = st.dictionaries(st.integers(0, 9), st.integers(0, 20), max_size=6)


def test_round_robin_goes_on_where_it_stopped() -> None:
    turns = RoundRobin()
    ready = {1: 9, 2: 9, 5: 9}
    assert turns.plan(ready, 4).order == [1, 2, 5, 1]
    assert turns.plan(ready, 1).order == [2]
    assert turns.plan({1: 9, 2: 9}, 3).order == [1, 2, 1]  # 5 has nothing: after 2 comes 1


def test_round_robin_passes_over_what_ran_out() -> None:
    assert RoundRobin().plan({1: 1, 2: 3, 3: 0}, 9).order == [1, 2, 2, 2]


def test_weighted_turns_are_spread() -> None:
    turns = Weighted({1: 3, 2: 1, 3: 1})
    assert turns.plan({1: 99, 2: 99, 3: 99}, 10).order == [1, 2, 1, 3, 1, 1, 2, 1, 3, 1]


@given(st.dictionaries(st.integers(0, 9), st.integers(1, 7), min_size=1, max_size=5), st.integers(1, 3))
def test_weighted_serves_each_its_weight_in_every_round(weights: dict[int, int], rounds: int) -> None:
    turns = Weighted(weights)
    ready = dict.fromkeys(weights, 1000)
    for _ in range(rounds):
        assert turns.plan(ready, sum(weights.values())).counts() == weights


@given(st.dictionaries(st.integers(0, 4), st.integers(1, 7), min_size=2), st.lists(st.integers(1, 9), max_size=9))
def test_batches_take_the_turns_that_single_pops_would(weights: dict[int, int], wants: list[int]) -> None:
    ready = dict.fromkeys(weights, 1000)
    for batches, singles in ((RoundRobin(), RoundRobin()), (Weighted(weights), Weighted(weights))):
        for want in wants:
            assert batches.plan(ready, want).order == [singles.plan(ready, 1).order[0] for _ in range(want)]


@pytest.mark.parametrize("kind", [RoundRobin, Weighted])
@given(plans=st.lists(st.tuples(READY, st.integers(0, 30)), max_size=5))
def test_plan_takes_what_is_wanted_and_no_more_than_there_is(
    kind: type[Rotation], plans: list[tuple[dict[int, int], int]]
) -> None:
    turns = kind()
    for ready, want in plans:
        plan = turns.plan(ready, want)
        assert len(plan.order) == min(want, sum(ready.values()))
        assert not Counter(plan.order) - Counter(ready)


def test_partition_that_had_nothing_saves_no_credit_up() -> None:
    turns = Weighted({1: 1, 2: 1})
    turns.plan({1: 100}, 100)
    assert turns.plan({1: 100, 2: 100}, 10).counts() == {1: 5, 2: 5}


def test_bound_is_promised_for_best_first_only() -> None:
    assert [bound_in_force(s, 7) for s in ("best_first", "round_robin", "weighted")] == [7, None, None]
    assert rotation("best_first") is None
    assert isinstance(rotation("weighted", {1: 2.0}), Weighted)


@pytest.mark.parametrize(
    "call",
    [
        lambda: rotation("worst_first"),  # type: ignore[arg-type]
        lambda: Weighted({1: -1}),
        lambda: Ages(max_staleness_ms=-1),
        lambda: Ages(min_freshness_ms=-5),
    ],
)
def test_bad_settings_are_refused(call: object) -> None:
    with pytest.raises(BadRequest):
        call()  # type: ignore[operator]


# --- ages -------------------------------------------------------------------------------------------------------------


def index_of(heads: dict[int, tuple[int, int, int]], fan_out: int = 2) -> SpineIndex:
    """partition → (key, id, when it was shown)."""
    index = SpineIndex(fan_out)
    for partition, (key, id, at) in heads.items():
        index.add(partition)
        index.update(partition, [(key, id)], at)
    return index


def test_without_limits_the_best_is_taken_at_any_age() -> None:
    index = index_of({1: (5, 50, 1000), 2: (7, 70, 0)})
    assert choose_best(index, Ages(), 1000) == Take(1, 5, 50)
    assert choose_best(SpineIndex(), Ages(), 0) == Wait(None)


def test_stale_best_is_asked_for_again_before_it_is_taken() -> None:
    index = index_of({1: (5, 50, 0), 2: (7, 70, 900)})
    ages = Ages(max_staleness_ms=100)
    assert choose_best(index, ages, 100) == Take(1, 5, 50)
    assert choose_best(index, ages, 101) == Refresh([1])
    index.update(1, [(5, 50)], 101)
    assert choose_best(index, ages, 101) == Take(1, 5, 50)


def test_young_best_makes_best_first_wait_though_others_are_ripe() -> None:
    index = index_of({1: (5, 50, 1000), 2: (7, 70, 0)})
    ages = Ages(min_freshness_ms=100)
    assert choose_best(index, ages, 1099) == Wait(1100)
    assert choose_best(index, ages, 1100) == Take(1, 5, 50)


def test_refreshed_candidate_does_not_have_to_ripen_again() -> None:
    index = index_of({1: (5, 50, 0)})
    ages = Ages(max_staleness_ms=100, min_freshness_ms=100)
    index.update(1, [(5, 50)], 150)
    assert choose_best(index, ages, 150) == Take(1, 5, 50)


def test_unknown_remainder_is_asked_for_before_anything_is_taken() -> None:
    index = index_of({1: (5, 50, 0), 2: (7, 70, 0)}, fan_out=1)
    index.advance(1)
    assert choose_best(index, Ages(), 0) == Refresh([1])


def test_turns_pass_over_young_partitions_and_ask_stale_ones() -> None:
    index = index_of({1: (5, 50, 1000), 2: (7, 70, 900), 3: (1, 10, 0), 4: (9, 90, 950)})
    index.add(5)
    index.set_throttled(4, "maintenance")
    ages = Ages(max_staleness_ms=500, min_freshness_ms=50)
    assert eligible_partitions(index, ages, 1000) == Eligible([2], [3], 1050)
    assert eligible_partitions(index, Ages(), 1000) == Eligible([1, 2, 3], [], None)
