"""Sinks: a version is committed once, however often the commit is repeated and whatever its batch is named."""

from __future__ import annotations

import asyncio

import pytest

import heapline
from heapline.contract.broker import Broker
from tests.conformance.test_prepared_batches import some, taken
from tests.conformance.worlds import World

pytestmark = pytest.mark.feature("batches")


async def prepared(hl: Broker, batch: str, part: str = "1", *payloads: str) -> None:
    await hl.prepare_batch(batch, part, some(*payloads or (batch,)), topic="jobs")


async def waiting(hl: Broker) -> int:
    return sum(p.prepared for p in (await hl.stats("jobs")).partitions)


async def test_repeat_of_a_version_under_other_names_changes_nothing_and_drops_its_parts(jobs: Broker) -> None:
    await prepared(jobs, "b0", "attempt-0", "a", "b")
    assert await jobs.commit_batch("b0", ["attempt-0"], sink="s", version=0) == 2
    await prepared(jobs, "replayed", "attempt-1", "a", "b")
    assert await jobs.commit_batch("replayed", ["attempt-1"], sink="s", version=0) == 2
    assert await waiting(jobs) == 0
    assert await taken(jobs) == ["a", "b"]


async def test_repeated_batch_with_other_parts_is_accepted(jobs: Broker) -> None:
    await prepared(jobs, "b")
    assert await jobs.commit_batch("b", ["1"], sink="s", version=5) == 1
    assert await jobs.commit_batch("b", ["2", "never prepared"], sink="s", version=5) == 1
    assert await taken(jobs) == ["b"]


async def test_lower_version_changes_nothing(jobs: Broker) -> None:
    await prepared(jobs, "new")
    assert await jobs.commit_batch("new", ["1"], sink="s", version=7) == 1
    await prepared(jobs, "old")
    assert await jobs.commit_batch("old", ["1"], sink="s", version=3) == 0
    assert (await waiting(jobs), await taken(jobs)) == (0, ["new"])


async def test_part_of_a_committed_or_skipped_version_is_rejected(jobs: Broker) -> None:
    await prepared(jobs, "b")
    assert await jobs.commit_batch("b", ["1"], sink="s", version=7) == 1
    for version in (3, 7):
        with pytest.raises(heapline.BatchDecided, match=f"is version {version} of sink 's'"):
            await jobs.prepare_batch("late", "1", some("late"), topic="jobs", sink="s", version=version)
    assert await waiting(jobs) == 0
    await jobs.prepare_batch("next", "1", some("next"), topic="jobs", sink="s", version=8)
    assert await jobs.commit_batch("next", ["1"], sink="s", version=8) == 1
    assert await taken(jobs) == ["b", "next"]


async def test_higher_version_is_committed_and_sinks_are_independent(jobs: Broker) -> None:
    for number, (sink, version) in enumerate([("s", 0), ("s", 1), ("other", 0), ("s", 9)]):
        await prepared(jobs, f"b{number}")
        assert await jobs.commit_batch(f"b{number}", ["1"], sink=sink, version=version) == 1
    assert len(await taken(jobs)) == 4


async def test_empty_commit_raises_the_version(jobs: Broker) -> None:
    assert await jobs.commit_batch("empty", [], sink="s", version=4) == 0
    await prepared(jobs, "late")
    assert await jobs.commit_batch("late", ["1"], sink="s", version=4) == 0
    assert await taken(jobs) == []


async def test_missing_part_fails_the_commit_and_keeps_the_version(jobs: Broker) -> None:
    await prepared(jobs, "b")
    with pytest.raises(heapline.UnknownPart):
        await jobs.commit_batch("b", ["1", "2"], sink="s", version=0)
    assert await jobs.list_sinks() == []
    assert await jobs.commit_batch("b", ["1"], sink="s", version=0) == 1


async def test_committed_batch_cannot_take_another_version(jobs: Broker) -> None:
    await prepared(jobs, "b")
    await jobs.commit_batch("b", ["1"], sink="s", version=0)
    for sink, version in (("s", 1), ("other", 0)):
        with pytest.raises(heapline.BatchDecided):
            await jobs.commit_batch("b", ["1"], sink=sink, version=version)
    with pytest.raises(heapline.BatchDecided):
        await prepared(jobs, "b", "late attempt")
    assert await jobs.commit_batch("b", ["1"]) == 1
    assert await taken(jobs) == ["b"]


async def test_only_one_of_concurrent_commits_of_a_version_is_applied(jobs: Broker) -> None:
    batches = [f"b{number}" for number in range(8)]
    for batch in batches:
        await prepared(jobs, batch, "1", "x")
    commits = [jobs.commit_batch(batch, ["1"], sink="s", version=0) for batch in batches]
    assert await asyncio.gather(*commits) == [1] * 8
    assert (await waiting(jobs), await taken(jobs)) == (0, ["x"])


async def test_sinks_are_listed_with_their_last_commit(jobs: Broker) -> None:
    assert await jobs.list_sinks() == []
    for version in (0, 1):
        await prepared(jobs, f"b{version}", "1", "x", "y")
        await jobs.commit_batch(f"b{version}", ["1"], sink="txn:load", version=version)
    await jobs.commit_batch("c", [], sink="query:1", version=3)
    first, second = await jobs.list_sinks()
    assert (first.name, first.version, first.messages, first.topics) == ("query:1", 3, 0, [])
    assert (second.name, second.version, second.batch_id, second.messages, second.topics) == (
        "txn:load", 1, "b1", 2, ["jobs"],
    )  # fmt: skip
    assert second.committed_at.utcoffset() is not None


async def test_sinks_are_known_after_a_restart(world: World, jobs: Broker) -> None:
    await prepared(jobs, "b")
    await jobs.commit_batch("b", ["1"], sink="s", version=2)
    before = await jobs.list_sinks()
    hl = await world.reopen()
    assert await hl.list_sinks() == before
    await prepared(hl, "again")
    assert await hl.commit_batch("again", ["1"], sink="s", version=2) == 1
    assert await taken(hl) == ["b"]


async def test_forgotten_sink_starts_again(jobs: Broker) -> None:
    for version in range(3):
        await jobs.commit_batch(f"b{version}", [], sink="a sink/of: mine?", version=version)
    assert await jobs.forget_sink("a sink/of: mine?") is True
    assert await jobs.list_sinks() == []
    assert await jobs.forget_sink("a sink/of: mine?") is False
    await prepared(jobs, "b0")
    assert await jobs.commit_batch("b0", ["1"], sink="a sink/of: mine?", version=0) == 1
    assert await taken(jobs) == ["b0"]


@pytest.mark.parametrize(
    ("sink", "version"), [("s", None), (None, 1), ("s", -1), ("s", "1"), ("s", True), ("", 1), ("x" * 1000, 1), (7, 1)]
)
async def test_sink_and_version_are_checked(jobs: Broker, sink: object, version: object) -> None:
    with pytest.raises(heapline.BadRequest):
        await jobs.commit_batch("b", [], sink=sink, version=version)  # type: ignore[arg-type]
    assert await jobs.list_sinks() == []
