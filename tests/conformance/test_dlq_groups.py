"""Dead letters by reason, and actions on exactly the set that was counted."""

from __future__ import annotations

import pytest

from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest, TopicNotFound
from heapline.contract.message import DlqFilter
from tests.conformance.conftest import MakeTopic
from tests.conformance.test_dead_letters import bury
from tests.conformance.worlds import World

pytestmark = [pytest.mark.feature("dlq_groups"), pytest.mark.usefixtures("fake_time")]


async def test_reasons_that_differ_in_numbers_are_one_group(world: World, topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=3)
    ids = []
    for n in range(4):
        ids += await bury(broker, n, reason=f"Traceback\n  line {n}\nTimeout: no answer after {n} s")
        await world.advance(0.01)
    await bury(broker, 9, reason="poison", headers={"heapline-task": "mail.send"})
    await world.advance(0.01)
    found = await broker.dlq_groups("jobs")
    assert (found.count, found.others) == (5, 0)
    timeouts, poison = found.items
    assert (timeouts.reason, timeouts.count, timeouts.tasks) == ("Timeout: no answer after # s", 4, [])
    assert timeouts.example.endswith("after 3 s")
    assert len(timeouts.message_ids) == 4
    assert timeouts.first_at < timeouts.last_at
    assert (poison.reason, poison.count, poison.tasks) == ("poison", 1, ["mail.send"])
    assert timeouts.match == "Timeout: no answer after"
    assert (await broker.dlq_count("jobs", DlqFilter(reason=timeouts.match))).count == 4
    less = await broker.dlq_groups("jobs", 1)
    assert ([group.count for group in less.items], less.count, less.others) == ([4], 5, 1)


async def test_letters_that_die_after_the_count_are_left_alone(world: World, jobs: Broker) -> None:
    first = await bury(jobs, 1, 2, reason="timeout")
    await bury(jobs, 3, reason="other")
    await world.advance(0.01)
    found = await jobs.dlq_count("jobs", DlqFilter(reason="timeout"))
    assert found.count == 2
    late = await bury(jobs, 4, reason="timeout")
    pinned = DlqFilter(reason="timeout", died_before=found.as_of)
    assert (await jobs.dlq_count("jobs", pinned)).count == 2
    assert await jobs.dlq_replay("jobs", where=pinned) == 2
    assert {message.id for message in await jobs.pop("jobs", 10)} == set(first)
    assert late[0] in {letter.id for letter in await jobs.dlq_list("jobs")}
    assert await jobs.dlq_delete("jobs", where=pinned) == 0


async def test_counted_letter_that_died_again_is_not_in_the_set(world: World, jobs: Broker) -> None:
    ids = await bury(jobs, 1, reason="timeout")
    await world.advance(0.01)
    found = await jobs.dlq_count("jobs")
    await jobs.dlq_replay("jobs", ids)
    (message,) = await jobs.pop("jobs")
    await message.bury(reason="timeout")
    await world.advance(0.01)
    assert await jobs.dlq_delete("jobs", where=DlqFilter(died_before=found.as_of)) == 0
    assert (await jobs.dlq_count("jobs")).count == 1


async def test_count_uses_every_field_of_the_filter(world: World, jobs: Broker) -> None:
    await bury(jobs, 1, key="a", reason="timeout")
    await bury(jobs, 2, key="b", reason="timeout")
    await world.advance(0.01)
    assert (await jobs.dlq_count("jobs", DlqFilter(key="a"))).count == 1
    assert (await jobs.dlq_count("jobs", DlqFilter(priority_min=2, reason="TIME"))).count == 1
    assert (await jobs.dlq_count("jobs", DlqFilter(reason="absent"))).count == 0
    assert (await jobs.dlq_count("jobs", DlqFilter(died_after=world.now()))).count == 0


async def test_groups_and_counts_of_nothing(jobs: Broker) -> None:
    assert (await jobs.dlq_groups("jobs")).items == []
    assert (await jobs.dlq_count("jobs")).count == 0
    with pytest.raises(TopicNotFound):
        await jobs.dlq_groups("nothing")
    with pytest.raises(BadRequest, match="limit"):
        await jobs.dlq_groups("jobs", 0)
