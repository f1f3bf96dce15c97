"""The worker pool under every simulated fault, and proof that the checkers would notice a broken rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.worker_pool import mutants
from tests.simulation.worker_pool.scenarios import (
    chaos_then_quiet,
    holder_counts_longer,
    holders_drop_slowly,
    only_its_clock_can_stop_it,
    others_read_the_past,
    run_seed,
    stops_slowly,
)

Scenario = Callable[..., Any]


@pytest.mark.parametrize("seed", range(1, 25))
def test_pool_keeps_its_guarantees_under_chaos(seed: int) -> None:
    report = run_seed(seed, seconds=20)
    assert not report.complaints, report.text()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_holder_stops_in_time_by_its_own_clock(seed: int) -> None:
    report = run_seed(seed, scenario=only_its_clock_can_stop_it)
    assert not report.complaints, report.text()
    assert report.documents == 3  # its partitions moved to others, so there was something to stop for


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_stale_reads_neither_end_sessions_nor_grant_partitions(seed: int) -> None:
    report = run_seed(seed, scenario=others_read_the_past)
    assert not report.complaints, report.text()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nothing_is_granted_before_it_is_dropped(seed: int) -> None:
    report = run_seed(seed, scenario=holders_drop_slowly)
    assert not report.complaints, report.text()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_stopping_worker_releases_nothing_before_dropping_everything(seed: int) -> None:
    report = run_seed(seed, scenario=stops_slowly)
    assert not report.complaints, report.text()


@pytest.mark.parametrize("seed", [1, 2])
def test_leader_waits_for_a_holder_with_a_longer_lease(seed: int) -> None:
    report = run_seed(seed, scenario=holder_counts_longer)
    assert not report.complaints, report.text()


def test_same_seed_gives_the_same_run() -> None:
    first, second = run_seed(3, seconds=10), run_seed(3, seconds=10)
    assert first.lines == second.lines
    assert (first.documents, first.moves) == (second.documents, second.moves)


#: The first seed is known to refute the mutant. If that seed's run has changed, others are tried.
@pytest.mark.parametrize(
    ("mutant", "scenario", "seed"),
    [
        (mutants.ends_leases_by_silence, others_read_the_past, 1),
        (mutants.confirms_before_the_hook, holders_drop_slowly, 1),
        (mutants.counts_its_lease_from_the_answer, only_its_clock_can_stop_it, 1),
        (mutants.grants_without_confirmation, holders_drop_slowly, 1),
        (mutants.goes_back_to_older_documents, others_read_the_past, 1),
        (mutants.ignores_its_own_clock, only_its_clock_can_stop_it, 1),
        (mutants.leaves_no_guard_for_drift, only_its_clock_can_stop_it, 1),
        (mutants.grants_to_workers_not_sessions, chaos_then_quiet, 1),
        (mutants.releases_before_it_has_dropped, stops_slowly, 1),
        (mutants.trusts_a_gone_key, others_read_the_past, 1),
        (mutants.counts_everybodys_lease_by_its_own_setting, holder_counts_longer, 1),
        (mutants.counts_everybodys_lease_by_its_own_setting, holder_counts_longer, 2),
    ],
)
def test_broken_rule_is_noticed(mutant: mutants.Mutant, scenario: Scenario, seed: int) -> None:
    for each in (seed, *range(1, 100)):
        with mutant():
            complaints = run_seed(each, scenario=scenario).complaints
        if any("SingleHolder" in complaint for complaint in complaints):
            return
    pytest.fail(f"no checker noticed {mutant.__name__}")


@pytest.mark.soak
def test_thousands_of_pools_keep_their_guarantees() -> None:
    for seed in range(10_000, 13_000):
        report = run_seed(seed)
        assert not report.complaints, report.text()
