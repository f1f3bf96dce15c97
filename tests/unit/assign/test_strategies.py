"""Strategies assign each partition to one worker, evenly, with few moves, and the same for every leader."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from heapline.assign.bounded_hash import Ring, hashes_of, sums_within
from heapline.assign.errors import AssignError, BadConfig, BadPartition, BadStrategy
from heapline.assign.partitions import WEIGHT_MAX, Partition
from heapline.assign.strategies import (
    AssignmentStrategy,
    RoundRobinStrategy,
    Shares,
    WeightedConsistentHashStrategy,
    affinity,
    assign_checked,
    moved_share,
)

BOTH = [WeightedConsistentHashStrategy(), RoundRobinStrategy()]
RING = WeightedConsistentHashStrategy()


def workers_named(count: int) -> list[str]:
    return [f"worker-{number}" for number in range(count)]


def partitions_of(count: int, weights: Sequence[int] = (1,)) -> list[Partition]:
    return [Partition((f"tool{n // 4}", f"chamber{n % 4}"), weights[n % len(weights)]) for n in range(count)]


def loads(shares: Shares) -> list[int]:
    return [sum(partition.weight for partition in share) for share in shares.values()]


def holder_of(shares: Shares) -> dict[str, str]:
    return {partition.id: worker for worker, share in shares.items() for partition in share}


def moves(before: Shares, after: Shares) -> dict[str, tuple[str | None, str]]:
    old = holder_of(before)
    return {id: (old.get(id), new) for id, new in holder_of(after).items() if old.get(id) != new}


FROZEN = {
    "a": ["tool0.chamber0", "tool0.chamber1"],
    "b": ["tool0.chamber2", "tool1.chamber0"],
    "c": ["tool0.chamber3", "tool1.chamber1"],
}

WEIGHTS = st.one_of(st.integers(0, 5), st.integers(0, 1000), st.sampled_from([0, 1, 10**6, 10**15, WEIGHT_MAX]))
KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters=".*>"), min_size=1)
PARTITIONS = st.dictionaries(st.integers(0, 200), WEIGHTS, max_size=60).map(
    lambda weights: [Partition((f"tøøl{n % 7}", f"部屋{n}"), weight) for n, weight in weights.items()]
)
WORKERS = st.lists(st.integers(0, 30).map("worker-{}".format), min_size=1, max_size=16, unique=True)


# --- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", BOTH, ids=lambda s: type(s).__name__)
@given(before=WORKERS, after=WORKERS, first=PARTITIONS, second=PARTITIONS)
@settings(max_examples=60, deadline=None)
def test_every_partition_goes_to_exactly_one_worker(
    strategy: AssignmentStrategy, before: list[str], after: list[str], first: list[Partition], second: list[Partition]
) -> None:
    """Even with a previous assignment of other workers and partitions; otherwise `assign_checked` raises."""
    previous = assign_checked(strategy, before, first)
    assert previous.keys() == set(before)
    assert assign_checked(strategy, after, second, previous).keys() == set(after)


@pytest.mark.parametrize("strategy", BOTH, ids=lambda s: type(s).__name__)
@given(before=WORKERS, workers=WORKERS, partitions=PARTITIONS, seed=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_assignment_does_not_depend_on_input_order(
    strategy: AssignmentStrategy,
    before: list[str],
    workers: list[str],
    partitions: list[Partition],
    seed: random.Random,
) -> None:
    previous = strategy.assign(before, partitions)
    once = strategy.assign(workers, partitions, previous)
    shuffled = {
        name: seed.sample(list(previous[name]), len(previous[name])) for name in seed.sample(before, len(before))
    }
    again = strategy.assign(seed.sample(workers, len(workers)), seed.sample(partitions, len(partitions)), shuffled)
    assert holder_of(once) == holder_of(again)


def test_assignment_is_the_same_on_every_machine_and_release() -> None:
    """A leader of another release must get the same ring."""
    assert {
        worker: [p.id for p in share] for worker, share in RING.assign(["a", "b", "c"], partitions_of(6)).items()
    } == FROZEN


@given(workers=WORKERS, partitions=PARTITIONS)
@settings(max_examples=60, deadline=None)
def test_every_worker_gets_a_partition_if_there_are_enough(workers: list[str], partitions: list[Partition]) -> None:
    shares = RING.assign(workers, partitions)
    assert sum(not share for share in shares.values()) == max(0, len(workers) - len(partitions))


@given(workers=WORKERS, partitions=PARTITIONS)
@settings(max_examples=60, deadline=None)
@example(workers=["worker-0", "worker-1"], partitions=[Partition("a", 3), Partition("b", 3), Partition("c", 2)])
def test_load_is_bounded_as_far_as_single_weights_allow(workers: list[str], partitions: list[Partition]) -> None:
    """No load exceeds the bound by more than one partition that found no room anywhere."""
    shares = RING.assign(workers, partitions)
    mean = sum(partition.weight for partition in partitions) / len(workers)
    for share in shares.values():
        weights = sorted((partition.weight for partition in share), reverse=True)
        assert sum(weights) <= max(1.15 * mean, mean + max(weights, default=0)) * (1 + 1e-9)
        if weights and weights[0] > 1.15 * mean * (1 + 1e-9) and mean:
            others = [partition for partition in share if partition.weight][1:]
            assert not others, "a giant has a worker to itself"


@given(workers=WORKERS, before=WORKERS, partitions=PARTITIONS)
@settings(max_examples=60, deadline=None)
def test_repeated_assignment_settles_immediately_or_soon(
    workers: list[str], before: list[str], partitions: list[Partition]
) -> None:
    """Few, heavy partitions may need another round, in which loads become more even."""
    shares = RING.assign(workers, partitions, RING.assign(before, partitions))
    for _ in range(5):
        last, shares = shares, RING.assign(workers, partitions, shares)
        if last == shares:
            return
    pytest.fail("it never settles")


@given(workers=WORKERS, count=st.integers(0, 60))
@settings(max_examples=40, deadline=None)
def test_repeated_assignment_moves_nothing_with_equal_weights(workers: list[str], count: int) -> None:
    shares = RING.assign(workers, partitions_of(count))
    assert RING.assign(workers, partitions_of(count), shares) == shares


# --- a pool of the usual size ----------------------------------------------------------------------------------------

WEIGHTS = {"equal": (1,), "weighted": (50, 100, 150, 300), "with zeros": (0, 1, 1, 7)}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_load_stays_within_the_bound_as_workers_join_and_leave(weights: tuple[int, ...]) -> None:
    chance = random.Random(6)
    partitions = partitions_of(5000, weights)
    present, shares = workers_named(64), RING.assign(workers_named(64), partitions)
    for _ in range(30):
        if chance.random() < 0.5:
            present.append(f"late-{chance.randrange(10**9)}")
        else:
            present.remove(chance.choice(present))
        before, shares = shares, RING.assign(present, partitions, shares)
        mean = sum(loads(shares)) / len(present)
        assert max(loads(shares)) <= 1.15 * mean
        assert min(loads(shares)) >= 0.8 * mean
        assert affinity(before, shares) >= 0.95


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("count", [2, 5, 64])
def test_joining_worker_gets_its_share_and_nothing_else_moves(count: int, weights: tuple[int, ...]) -> None:
    partitions, pool = partitions_of(2000, weights), workers_named(count)
    before = RING.assign(pool, partitions)
    after = RING.assign([*pool, "newcomer"], partitions, before)
    share = sum(loads(after)) / (count + 1)
    assert {new for _, new in moves(before, after).values()} == {"newcomer"}
    assert 0.8 * share <= sum(partition.weight for partition in after["newcomer"]) <= 1.15 * share


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("count", [2, 5, 64])
def test_leaving_worker_moves_its_partitions_and_no_others(count: int, weights: tuple[int, ...]) -> None:
    partitions, pool = partitions_of(2000, weights), workers_named(count)
    before = RING.assign(pool, partitions)
    after = RING.assign(pool[1:], partitions, before)
    assert moves(before, after).keys() == {partition.id for partition in before["worker-0"]}


def test_replacement_gets_the_replaced_workers_partitions() -> None:
    partitions, pool = partitions_of(2000), workers_named(20)
    before = RING.assign(pool, partitions)
    after = RING.assign([*pool[1:], "newcomer"], partitions, before)
    assert moves(before, after).keys() == {partition.id for partition in before["worker-0"]}
    assert len(after["newcomer"]) >= 0.85 * 100


def test_pool_growing_from_one_worker_is_filled_evenly() -> None:
    partitions = partitions_of(2000)
    before = RING.assign(["worker-0"], partitions)
    after = RING.assign(workers_named(64), partitions, before)
    assert max(loads(after)) <= 1.15 * 2000 / 64
    assert {old for old, _ in moves(before, after).values()} == {"worker-0"}


def test_ring_alone_keeps_most_partitions_in_place() -> None:
    partitions, pool = partitions_of(5000), workers_named(64)
    before, after = RING.assign(pool, partitions), RING.assign(pool[1:], partitions)
    assert affinity(before, after) >= 0.94


def test_new_partitions_move_no_others() -> None:
    pool = workers_named(10)
    before = RING.assign(pool, partitions_of(1000))
    after = RING.assign(pool, partitions_of(1020), before)
    assert all(old is None for old, _ in moves(before, after).values())


def test_partition_that_grew_too_heavy_stays_and_displaces_others() -> None:
    pool, partitions = workers_named(4), partitions_of(40)
    before = RING.assign(pool, partitions)
    worker, first = "worker-2", before["worker-2"][0]
    grown = [Partition(p.keys, 1000) if p == first else p for p in partitions]
    after = RING.assign(pool, grown, before)
    assert after[worker] == [first]
    assert max(loads({w: s for w, s in after.items() if w != worker})) <= 1.15 * 13
    assert {old for old, _ in moves(before, after).values()} == {worker}


def test_heavier_of_two_giants_stays_with_its_worker() -> None:
    big, bigger, small = Partition("big", 1000), Partition("bigger", 2000), partitions_of(30)
    before = {"worker-0": [big, bigger], "worker-1": small[:15], "worker-2": small[15:]}
    after = RING.assign(workers_named(3), [big, bigger, *small], before)
    assert after["worker-0"] == [bigger]
    assert sorted(map(len, after.values())) == [1, 1, 30]


@pytest.mark.parametrize("name", ["giant", "Goliath", "Gargantua", "巨人", "Polyphemus"])
def test_new_giant_goes_to_an_empty_worker(name: str) -> None:
    small, giant = partitions_of(40), Partition(name, 10**6)
    before = RING.assign(workers_named(4), small)
    after = RING.assign([*workers_named(4), "newcomer"], [*small, giant], before)
    assert after == {**before, "newcomer": [giant]}


def test_new_worker_gets_a_partition_even_if_the_fullest_cannot_shed() -> None:
    """Thirty workers hold one heavy partition each and cannot shed it; the others carry less, in two partitions."""
    heavy = [Partition(("heavy", str(n)), 114) for n in range(30)]
    light = [Partition(("light", str(n)), 49) for n in range(68)]
    before = {f"worker-{n}": [heavy[n]] for n in range(30)}
    before |= {f"worker-{30 + n}": light[2 * n : 2 * n + 2] for n in range(34)}
    after = RING.assign([*workers_named(64), "newcomer"], heavy + light, before)
    assert len(after["newcomer"]) >= 1
    assert {new for _, new in moves(before, after).values()} == {"newcomer"}


def test_worker_keeps_its_one_heavy_partition_when_another_joins() -> None:
    heavy, small = Partition("heavy", 105), partitions_of(1900)
    before = {"worker-0": [heavy]} | {f"worker-{n}": small[100 * (n - 1) : 100 * n] for n in range(1, 20)}
    after = RING.assign([*workers_named(20), "newcomer"], [heavy, *small], before)
    assert after["worker-0"] == [heavy]
    assert len(after["newcomer"]) >= 85


def test_leavers_partitions_fill_new_workers_before_others_shed() -> None:
    partitions, pool = partitions_of(2000), workers_named(20)
    before = RING.assign(pool, partitions)
    after = RING.assign([*pool[1:], "one", "two"], partitions, before)
    moved = moves(before, after)
    assert {new for _, new in moved.values()} == {"one", "two"}
    assert {partition.id for partition in before["worker-0"]} <= moved.keys()
    assert len(moved) <= 2 * 2000 / 21 + 2


def test_nothing_moves_if_no_assignment_is_better() -> None:
    """These can be assigned in several ways, none of them within the bounds."""
    partitions = [Partition(("p", str(n)), weight) for n, weight in enumerate([0, 0, 2, 1, 2, 2, 1, 1])]
    shares = RING.assign(workers_named(5), partitions)
    assert RING.assign(workers_named(5), partitions, shares) == shares


@pytest.mark.parametrize("seed", range(40))
def test_assignment_settles_even_if_heavy_partitions_do_not_fit(seed: int) -> None:
    chance = random.Random(seed)
    pool = workers_named(chance.choice([2, 3, 5, 8, 16]))
    partitions = [Partition(("p", str(n)), int(chance.paretovariate(1.1) * 10)) for n in range(chance.randint(0, 60))]
    before = RING.assign(pool[: chance.randint(1, len(pool))], partitions)
    shares = RING.assign(pool, partitions, before)
    assert RING.assign(pool, partitions, shares) == shares


# --- weights ----------------------------------------------------------------------------------------------------------


def test_giant_has_its_own_worker_and_the_others_share_the_rest() -> None:
    partitions = [Partition("giant", WEIGHT_MAX), *partitions_of(900)]
    shares = RING.assign(workers_named(10), partitions)
    (alone,) = [share for share in shares.values() if Partition("giant") in share]
    assert alone == [Partition("giant")]
    assert max(len(share) for share in shares.values()) <= 115


def test_zero_weight_partitions_are_spread_too() -> None:
    shares = RING.assign(workers_named(10), partitions_of(1000, (0,)))
    assert 85 <= min(map(len, shares.values())) <= max(map(len, shares.values())) <= 115


def test_zero_weight_partitions_do_not_change_the_other_shares() -> None:
    idle = [Partition(("idle", str(n)), 0) for n in range(500)]
    shares = RING.assign(workers_named(10), [*partitions_of(1000), *idle])
    assert max(loads(shares)) <= 115
    assert max(map(len, shares.values())) < 300


def test_fewer_partitions_than_workers_go_to_one_worker_each() -> None:
    shares = RING.assign(workers_named(50), partitions_of(20))
    assert sorted(map(len, shares.values())) == [0] * 30 + [1] * 20
    assert moves(shares, RING.assign(workers_named(51), partitions_of(20), shares)) == {}


def test_one_worker_gets_everything_in_the_order_given() -> None:
    assert RING.assign(["only"], partitions_of(10)) == {"only": partitions_of(10)}
    assert RING.assign(["only"], []) == {"only": []}


# --- round robin ------------------------------------------------------------------------------------------------------


def test_round_robin_deals_sorted_partitions_to_sorted_workers() -> None:
    parts = [Partition(letter) for letter in "edcba"]
    shares = RoundRobinStrategy().assign(["w2", "w1"], parts)
    assert {worker: [p.id for p in share] for worker, share in shares.items()} == {
        "w1": ["a", "c", "e"],
        "w2": ["b", "d"],
    }


# --- rejected input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", BOTH, ids=lambda s: type(s).__name__)
def test_duplicate_partition_is_rejected_by_name(strategy: AssignmentStrategy) -> None:
    with pytest.raises(BadPartition, match=r"'a\.b' is listed twice"):
        strategy.assign(["w"], [Partition(("a", "b"), 1), Partition(("a", "b"), 2)])


@pytest.mark.parametrize("strategy", BOTH, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("workers", [[], ["w", "w"]])
def test_empty_or_duplicate_workers_are_rejected(strategy: AssignmentStrategy, workers: list[str]) -> None:
    with pytest.raises(BadConfig, match="worker"):
        strategy.assign(workers, partitions_of(3))


@pytest.mark.parametrize(
    "fields", [{"virtual_nodes": 0}, {"virtual_nodes": 1.5}, {"load_bound": 1.0}, {"load_bound": 3}]
)
def test_invalid_ring_settings_are_rejected(fields: dict[str, int]) -> None:
    with pytest.raises(BadConfig, match=next(iter(fields))):
        WeightedConsistentHashStrategy(**fields)


class Own:
    """A strategy that only follows the protocol."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def assign(
        self, workers: Sequence[str], partitions: Sequence[Partition], previous: Shares | None = None
    ) -> Mapping[str, Sequence[Partition]]:
        return self.answer  # type: ignore[return-value]


A, B = Partition("a", 5), Partition("b")


def test_custom_strategy_is_used_and_empty_workers_are_added() -> None:
    assert isinstance(Own({}), AssignmentStrategy)
    assert assign_checked(Own({"w1": [A, B]}), ["w1", "w2"], [A, B]) == {"w1": (A, B), "w2": ()}


def test_strategy_with_two_parameters_is_used_as_in_the_seed() -> None:
    class MyStrategy:
        def assign(self, workers: Sequence[str], partitions: Sequence[Partition]) -> dict[str, list[Partition]]:
            return {workers[0]: list(partitions)}

    parts = [Partition("x"), Partition("y")]
    assert assign_checked(MyStrategy(), ["a", "b"], parts, {"b": parts}) == {"a": tuple(parts), "b": ()}


def test_type_error_inside_a_strategy_is_not_hidden_by_a_call_without_previous() -> None:
    calls = []

    class Wrong:
        def assign(self, workers: Sequence[str], partitions: Sequence[Partition], previous: Any = None) -> Any:
            calls.append(previous)
            raise TypeError("inside")

    with pytest.raises(BadStrategy, match="TypeError"):
        assign_checked(Wrong(), ["a"], [Partition("x")], {})
    assert calls == [{}]


def test_weights_in_a_custom_result_are_replaced_by_the_given_ones() -> None:
    (share,) = assign_checked(Own({"w1": [Partition("a", 99)]}), ["w1"], [A]).values()
    assert share[0].weight == 5


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ({"w1": [A]}, "did not assign 'b'"),
        ({}, "did not assign 'a', 'b'"),
        ({"w1": [A, B], "w2": [A]}, "assigned 'a' more than once"),
        ({"w1": [A, A, B]}, "assigned 'a' more than once"),
        ({"w1": [A, B, Partition("c")]}, "assigned 'c', which is not a partition"),
        ({"w1": [A], "w9": [B]}, "gave partitions to 'w9', which is not a worker"),
        (None, "failed with TypeError"),
        ({"w1": ["a", "b"]}, "failed with AttributeError"),
        ({"w1": None}, "failed with TypeError"),
    ],
)
def test_custom_strategy_with_an_invalid_result_is_rejected(answer: object, fault: str) -> None:
    with pytest.raises(BadStrategy, match=f"^strategy Own {fault}"):
        assign_checked(Own(answer), ["w1", "w2"], [A, B])


def test_error_of_a_custom_strategy_propagates() -> None:
    class Careful:
        def assign(self, workers: object, partitions: object, previous: object = None) -> Shares:
            raise AssignError("not today")

    with pytest.raises(AssignError, match="not today"):
        assign_checked(Careful(), ["w1"], [A])


# --- measures of movement --------------------------------------------------------------------------------------------


def test_affinity_is_the_share_of_common_partitions_that_stayed() -> None:
    before = {"w1": [Partition("a"), Partition("b")], "w2": [Partition("gone")]}
    after = {"w1": [Partition("a")], "w3": [Partition("b"), Partition("new")]}
    assert affinity(before, after) == 0.5
    assert affinity({}, after) == affinity({}, {}) == 1.0


def test_moved_share_is_by_weight_or_by_number_if_all_weights_are_0() -> None:
    before, after = {"w1": [A, B]}, {"w1": [B], "w2": [A]}
    assert moved_share(before, after) == 5 / 6
    light = Partition("x", 0), Partition("y", 0)
    assert moved_share({"w1": light}, {"w1": light[:1], "w2": light[1:]}) == 0.5
    assert moved_share({}, {}) == 0.0


# --- the ring ---------------------------------------------------------------------------------------------------------


@given(
    names=st.lists(st.text(max_size=5), min_size=1, max_size=5, unique=True),
    keys=st.lists(KEYS, max_size=20),
    is_open=st.lists(st.booleans(), min_size=5, max_size=5),
)
@settings(max_examples=40, deadline=None)
def test_ring_finds_the_first_open_worker_clockwise(names: list[str], keys: list[str], is_open: list[bool]) -> None:
    ring, flags = Ring(names, 7), np.array(is_open[: len(names)])
    flags[0] |= not flags.any()
    nodes = [(int(point), int(owner)) for point, owner in zip(ring.points, ring.owners, strict=True) if flags[owner]]
    hashes = hashes_of(keys)
    owners, points = ring.first_open(hashes, flags)
    for hash, owner, point in zip(hashes.tolist(), owners.tolist(), points.tolist(), strict=True):
        assert (point, owner) == next((node for node in nodes if node[0] >= hash), nodes[0])


def test_workers_virtual_nodes_do_not_depend_on_other_workers() -> None:
    alone, together = Ring(["b"], 150), Ring(["a", "b", "c"], 150)
    assert together.points[together.owners == 1].tolist() == alone.points.tolist()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=30).map(sorted))
def test_running_sums_restart_with_each_group(rows: list[tuple[int, int]]) -> None:
    groups, weights = np.array([g for g, _ in rows], dtype=np.int64), np.array([w for _, w in rows], dtype=np.float64)
    expected = [sum(w for h, w in rows[: at + 1] if h == g) for at, (g, _) in enumerate(rows)]
    assert sums_within(groups, weights).tolist() == expected
