"""The spine keeps its bound whatever the network, crashes and operators do; and its oracle can fail.

A failed run names its seed: `explore(seed=…)` of `tests.simulation.spine_world` repeats it. SPINE_SEEDS=10000 runs
more seeds than usual; `pytest -m soak` runs new ones for SPINE_SOAK_SECONDS.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation import spine_mutants as mutants
from tests.simulation import spine_scenarios as scenarios
from tests.simulation.spine_parts import SimPartition
from tests.simulation.spine_protocol.coordinator import Spine
from tests.simulation.spine_protocol.messages import LeaseRequest, ToSpine
from tests.simulation.spine_protocol.publisher import Publisher
from tests.simulation.spine_world import WEIGHTS, Step, World, explore, random_steps

SEEDS = int(os.environ.get("SPINE_SEEDS", "100"))
SOAK_SECONDS = float(os.environ.get("SPINE_SOAK_SECONDS", "300"))
SEEDS_PER_TEST = 50
SEEDS_TO_FIND = 300


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
def test_rank_stays_within_k_and_everything_is_delivered(first: int) -> None:
    for seed in range(first, min(first + SEEDS_PER_TEST, SEEDS)):
        complaints = explore(seed)
        assert complaints == [], f"repeat with explore(seed={seed}): {complaints[0]}"


steps = st.lists(
    st.tuples(
        st.sampled_from([name for name, weight in WEIGHTS.items() for _ in range(max(1, round(weight / 4)))]),
        st.integers(0, 1 << 16),
        st.integers(0, 1 << 16),
    ),
    max_size=120,
)


@settings(max_examples=40)
@given(st.sampled_from([1, 1, 2, 3, 5]), st.integers(1, 3), st.booleans(), steps)
def test_no_order_of_events_breaks_the_bound(k: int, partitions: int, is_lazy: bool, script: list[Step]) -> None:
    world = World(k, partitions)
    world.is_lazy = is_lazy
    assert world.play(script) == []


@pytest.mark.soak
def test_rank_stays_within_k_over_new_seeds() -> None:
    first = time.time_ns()
    end = time.monotonic() + SOAK_SECONDS
    seed = first
    while time.monotonic() < end:
        complaints = explore(seed, steps=1500)
        assert complaints == [], f"repeat with explore(seed={seed}, steps=1500): {complaints[0]}"
        seed += 1


def test_the_same_seed_is_the_same_run() -> None:
    def ranks(seed: int) -> list[int]:
        world = World(5, 3)
        world.play(random_steps(Random(seed), 300))
        return world.ranks

    assert ranks(3) == ranks(3) != ranks(4)


def test_ranks_up_to_the_bound_occur() -> None:
    """A spine that only ever delivered the best would keep any bound; with K = 5, ranks up to 5 occur."""
    worst = 0
    for seed in range(60):
        world = World(5, 2)
        world.ascent = -1
        world.play(random_steps(Random(seed), 300))
        worst = max(worst, *world.ranks, 0)
    assert worst == 5


# --- each clause of the protocol: a scenario that depends on it -------------------------------------------------------

#: Each scenario, and the clause whose removal the oracle must detect.
STORIES: list[tuple[Callable[..., list[str]], type[Publisher] | type[Spine]]] = [
    (scenarios.worse_head_in_flight, mutants.CountsAgainstLastAcknowledged),
    (scenarios.better_head_not_yet_acknowledged, mutants.HoldsNothingBack),
    (scenarios.better_head_not_yet_acknowledged, mutants.IgnoresLimit),
    (scenarios.restart_with_head_in_flight, mutants.CountsAgainstLastSent),
    (scenarios.outdated_request_after_better_head, mutants.AcceptsOutdatedRequests),
    (scenarios.cancelled_request_arrives, mutants.ForgetsCancellations),
    (scenarios.cancelled_request_arrives, mutants.LeasesAgainForDoubledRequest),
    (scenarios.better_head_while_request_is_under_way, mutants.AcknowledgesDuringRequest),
    (scenarios.better_head_while_request_is_under_way, mutants.SetsNoLimit),
    (scenarios.clock_runs_out, mutants.GivesUpOnClock),
    (scenarios.request_of_earlier_boot, mutants.ServesRequestsOfEarlierBoot),
    (scenarios.restart_with_head_in_flight, mutants.TakesHeadsAsKnownOnRestart),
    (scenarios.new_spine_acknowledges_early, mutants.AcknowledgesBeforeAllOpened),
    (scenarios.new_spine_and_heads_of_old, mutants.ForgetsHeadsAtOpen),
    (scenarios.new_spine_with_larger_budget, mutants.RaisesBudgetAtOpen),
    (scenarios.growth_before_budget_is_kept, mutants.AdmitsBeforeBudgetIsKept),
    (scenarios.outdated_budget, mutants.TakesOutdatedBudgets),
    (scenarios.outdated_budget, mutants.KeepsBudgetOfFewer),
    (scenarios.budget_of_earlier_boot, mutants.TakesBudgetOfEarlierBoot),
    (scenarios.repeated_opening_after_restart, mutants.TakesOpeningBudgetTwice),
]


@pytest.mark.parametrize("story", dict.fromkeys(story for story, _ in STORIES), ids=lambda story: story.__name__)
def test_scenario_keeps_the_bound(story: Callable[..., list[str]]) -> None:
    assert story() == []


@pytest.mark.parametrize(("story", "mutant"), STORIES, ids=lambda value: value.__name__)
def test_scenario_breaks_the_bound_without_its_clause(
    story: Callable[..., list[str]], mutant: type[Publisher] | type[Spine]
) -> None:
    complaints = story(publisher=mutant) if issubclass(mutant, Publisher) else story(spine=mutant)
    assert complaints
    assert "at rank" in complaints[0]


def test_lost_publication_is_resent_until_its_message_is_delivered() -> None:
    assert scenarios.lost_publication() == []
    assert "not everything was handed out" in scenarios.lost_publication(mutants.NeverSaysItAgain)[0]


def test_head_sent_before_its_lease_is_on_disk_breaks_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher's owner must not send its outbox before everything it depends on is durable."""

    def sends_early(partition: SimPartition) -> list[ToSpine]:
        outbox = partition.publisher.outbox[:]
        partition.publisher.outbox.clear()
        return outbox

    story = scenarios.Story(1, 2, Publisher, Spine)
    story.enqueues(0, 20)
    story.enqueues(1, 10, 30)
    story.all_arrives()
    monkeypatch.setattr(SimPartition, "sync", sends_early)
    story.pops()
    story.all_arrives()  # 10 is leased, and head 30 acknowledged
    story.does("crash", 1)
    story.pops()
    story.arrives(0, LeaseRequest)
    assert "at rank 2" in story.world.complaints[0]


# --- random runs also detect missing clauses --------------------------------------------------------------------------

FOUND_BY_CHANCE: list[type[Publisher] | type[Spine]] = [
    mutants.CountsAgainstLastAcknowledged,
    mutants.CountsAgainstLastSent,
    mutants.HoldsNothingBack,
    mutants.AcceptsOutdatedRequests,
    mutants.LeasesAgainForDoubledRequest,
    mutants.ForgetsCancellations,
    mutants.IgnoresLimit,
    mutants.FencesNobody,
    mutants.ForgetsEpochOnRestart,
    mutants.ForgetsBootOnRestart,
    mutants.PublishesOnlyWhatIsHeld,
    mutants.AcknowledgesDuringRequest,
    mutants.GivesUpOnClock,
    mutants.SetsNoLimit,
    mutants.AsksBeforeAllOpened,
    mutants.ReformsDuringRequest,
    mutants.IgnoresNumbers,
    mutants.KeepsBudgetOfFewer,
    mutants.NeverAsksAgain,
    mutants.TakesDoubledAnswers,
]


@pytest.mark.parametrize("mutant", FOUND_BY_CHANCE, ids=lambda mutant: mutant.__name__)
def test_random_runs_detect_a_missing_clause(mutant: type[Publisher] | type[Spine]) -> None:
    def complains(seed: int) -> bool:
        if issubclass(mutant, Publisher):
            return bool(explore(seed, publisher_class=mutant))
        return bool(explore(seed, spine_class=mutant))

    assert any(complains(seed) for seed in range(SEEDS_TO_FIND))
