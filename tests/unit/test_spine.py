"""The spine as a library: the examples of its specification, its bound against a sorted list, and threads."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from heapline import spine
from heapline.spine import Candidate, GlobalSelector, SelectionPolicy, SpineIndex


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def shown(*priorities: int, first_id: int = 0) -> list[Candidate]:
    return [Candidate(priority, first_id + number) for number, priority in enumerate(priorities)]


def index_of(shows: dict[int, list[Candidate]], **options: Any) -> SpineIndex:
    index = SpineIndex(**options)
    for partition, candidates in shows.items():
        index.add_partition(partition)
        index.update_candidates(partition, candidates)
    return index


def priorities(candidates: list[Candidate]) -> list[int]:
    return [candidate.priority for candidate in candidates]


# -- the examples of the specification ---------------------------------------------------------------------------------


def test_best_of_three_partitions_are_selected_in_order() -> None:
    index = SpineIndex(top_k=50, fan_out=3, mode="min")
    for partition in (1, 2, 3):
        index.add_partition(partition)
    index.update_candidates(1, [Candidate(1, 10, "a"), Candidate(4, 11, "d"), Candidate(9, 12, "f")])
    index.update_candidates(2, [Candidate(2, 20, "b"), Candidate(3, 21, "c")])
    index.update_candidates(3, [Candidate(5, 30, "e")])
    assert [c.value for c in index.select_best(10)] == ["a", "b", "c", "d", "e", "f"]
    with pytest.raises(spine.NoAvailableCandidates, match="update_candidates of 1"):
        index.select_best(10)


def test_highest_priority_is_best_with_mode_max() -> None:
    index = index_of({1: shown(9, 1), 2: shown(5, 3)}, mode="max")
    assert priorities(index.select_best(3)) == [9, 5, 3]


def test_weighted_policy_serves_partitions_in_proportion() -> None:
    index = index_of({n: shown(*range(20), first_id=100 * n) for n in (1, 2, 3)}, fan_out=20)
    selector = GlobalSelector(SelectionPolicy(strategy="weighted", partition_weights={1: 2.0, 2: 1.0, 3: 0.5}))
    chosen = selector.select(index.candidates(), 14)
    assert selector.stats().by_partition == {1: 8, 2: 4, 3: 2}
    assert [c.priority for c in chosen if c.partition == 1] == list(range(8))
    assert selector.stats()[:3] == ("weighted", 1, 14)


def test_round_robin_continues_with_the_partition_after_the_last() -> None:
    index = index_of({n: shown(n, n, first_id=10 * n) for n in (1, 2, 3)})
    selector = GlobalSelector(SelectionPolicy(strategy="round_robin"))
    assert [c.partition for c in selector.select(index.candidates(), 2)] == [1, 2]
    assert [c.partition for c in selector.select(index.candidates(), 2)] == [3, 1]


def test_throttled_partition_is_left_out_until_it_is_not() -> None:
    index = index_of({1: shown(5), 2: shown(1)})
    index.set_partition_throttled(2, True, "rebalancing")
    assert index.stats().partitions[2].throttled == "rebalancing"
    assert priorities(index.select_best(1)) == [5]
    with pytest.raises(spine.NoAvailableCandidates, match="1 of 2 are throttled"):
        index.select_best(1)
    index.set_partition_throttled(2, False)
    assert priorities(index.select_best(1)) == [1]


def test_stats_count_partitions_candidates_and_selections() -> None:
    index = index_of({1: shown(1, 2, 3), 2: shown(4)}, fan_out=3)
    index.set_partition_throttled(2, True)
    index.select_best(2)
    stats = index.stats()
    assert (stats.available, stats.candidates, stats.updates, stats.selections, stats.selected) == (1, 2, 2, 1, 2)
    assert stats.partitions[1] == spine.PartitionStats(1, 1, None, is_complete=False)


def test_errors_say_what_is_wrong() -> None:
    index = index_of({1: shown(1)}, capacity=1, top_k=5)
    with pytest.raises(spine.PartitionNotFound, match=r"add_partition\(7\)"):
        index.update_candidates(7, [])
    with pytest.raises(spine.SpineFull, match="1"):
        index.add_partition(2)
    with pytest.raises(spine.InvalidCandidate, match="best first"):
        index.update_candidates(1, shown(2, 1))
    with pytest.raises(spine.InvalidCandidate, match="integers"):
        index.update_candidates(1, [Candidate(1.5, 1)])  # type: ignore[arg-type]
    for count in (0, 6):
        with pytest.raises(ValueError, match="top_k, 5"):
            index.select_best(count)
    assert priorities(index.select_best(1)) == [1]  # nothing has changed
    index.close()
    with pytest.raises(spine.SpineClosed):
        index.stats()


# -- freshness ---------------------------------------------------------------------------------------------------------


def test_partition_that_was_not_updated_for_max_age_is_left_out() -> None:
    clock = Clock()
    index = index_of({1: shown(1), 2: shown(2, 3)}, max_age=30.0, clock=clock)
    clock.now += 20
    index.update_candidates(2, shown(2, 3))
    clock.now += 20
    assert priorities(index.select_best(5)) == [2, 3]
    assert index.stats().partitions[1].throttled == spine.STALE
    index.update_candidates(1, shown(1))
    assert priorities(index.select_best(5)) == [1]


def test_selector_leaves_out_what_is_too_old_or_too_new() -> None:
    clock = Clock()
    index = index_of({1: shown(1)}, clock=clock)
    clock.now += 5
    index.add_partition(2)
    index.update_candidates(2, shown(2))
    clock.now += 1
    policy = SelectionPolicy(max_staleness=5.0, min_freshness=2.0)
    selector = GlobalSelector(policy, clock=clock)
    with pytest.raises(spine.NoAvailableCandidates):
        selector.select(index.candidates(), 2)
    clock.now += 2
    assert [c.partition for c in selector.select(index.candidates(), 2)] == [2]
    assert selector.stats()[3:5] == (2, 1)


def test_fairness_takes_a_share_in_turn() -> None:
    index = index_of({1: shown(*range(10)), 2: shown(*range(100, 110), first_id=50)}, fan_out=10)
    selector = GlobalSelector(SelectionPolicy(fairness_weight=0.4))
    assert [c.partition for c in selector.select(index.candidates(), 10)] == [1, 2, 1, 2, 1, 1, 1, 1, 1, 1]


# -- the bound ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_selected_candidates_are_the_best_of_all_that_partitions_hold(seed: int) -> None:
    """Partitions refill when the index asks: what is selected is then the sorted list of all."""
    rng = random.Random(seed)
    fan_out, partitions = rng.choice((1, 2, 5)), rng.randrange(1, 6)
    held = {
        n: sorted((rng.randrange(50), rng.randrange(1 << 40)) for _ in range(rng.choice((0, 3, 40))))
        for n in range(partitions)
    }
    index = index_of({n: [Candidate(*row) for row in rows[:fan_out]] for n, rows in held.items()}, fan_out=fan_out)
    expected, found = sorted(row for rows in held.values() for row in rows), list[tuple[int, int]]()
    while any(held.values()):
        bound = index.bounds().actual_k
        if bound:
            chosen = index.select_best(min(100, rng.randrange(1, 10)))
            assert len(chosen) <= bound
            for candidate in chosen:
                held[candidate.partition].remove((candidate.priority, candidate.id))
                found.append((candidate.priority, candidate.id))
        for n in index.stats().hungry:
            index.update_candidates(n, [Candidate(*row) for row in held[n][:fan_out]])
    assert found == expected


def test_threads_select_each_candidate_once() -> None:
    count, threads = 4000, 4
    index = SpineIndex(fan_out=count, capacity=threads)
    for n in range(threads):
        index.add_partition(n)
    found: list[list[Candidate]] = [[] for _ in range(threads)]
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            index.update_candidates(n, [Candidate(i, n * count + i) for i in range(count - 1)])
            while True:
                found[n] += index.select_best(7)
                index.stats()
        except spine.NoAvailableCandidates:
            return
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert errors == []
    ids = [candidate.id for candidates in found for candidate in candidates]
    ids += [candidate.id for candidate in index.candidates()]  # of a partition that was shown last
    assert sorted(ids) == sorted(n * count + i for n in range(threads) for i in range(count - 1))
