"""Explain agrees with what pops hand out, says why a message is where it is, and changes nothing."""

from __future__ import annotations

import pytest

from heapline import Outgoing
from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest, MessageNotFound, TopicNotFound
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, put, take

pytestmark = pytest.mark.feature("explain")


async def test_explain_lists_what_pops_hand_out_best_first(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=3)
    await put(broker, 5, 1, 9, 1, 3)
    found = await broker.explain("jobs", 4)
    assert (found.topic, found.ready, found.holds) == ("jobs", 5, [])
    assert [item.line for item in found.items] == [1, 2, 3, 4]
    assert [item.message.priority for item in found.items] == [1, 1, 3, 5]
    assert found == await broker.explain("jobs", 4)  # nothing was leased or changed
    popped = [message.id for message in await broker.pop("jobs", 4)]
    assert [item.message.id for item in found.items] == popped


async def test_sentence_names_the_reason_of_each_place(topic: MakeTopic, broker: Broker) -> None:
    await topic()
    await put(broker, 2, 1, 1)
    first, second, third = [item.text for item in (await broker.explain("jobs")).items]
    assert first.startswith("Next in line: priority 1, waited ")
    assert second.startswith("Second in line: priority 1, waited ")
    assert second.endswith("because it is newer.")
    assert third.endswith("because its priority is worse.")


async def test_explained_message_has_no_payload_and_no_headers(jobs: Broker) -> None:
    await jobs.enqueue("jobs", b"secret", headers={"token": "secret"}, key="k")
    (item,) = (await jobs.explain("jobs")).items
    assert (item.message.payload, item.message.headers, item.message.key) == (None, {}, "k")
    assert "secret" not in repr(item)


@pytest.mark.usefixtures("fake_time")
async def test_aging_is_a_term_of_the_explanation(world: World, topic: MakeTopic, broker: Broker) -> None:
    await topic(ordering={"rate": 1.0})
    await put(broker, 100)
    await world.advance(60)
    await put(broker, 50)
    old, new = (await broker.explain("jobs")).items
    assert (old.message.priority, old.effective_priority) == (100, pytest.approx(40, abs=1))
    assert new.effective_priority == pytest.approx(50, abs=1)
    assert old.line == 1
    assert "priority 100, now 4" in old.text
    assert new.text.endswith("because it has waited less.")


@pytest.mark.feature("fairness")
async def test_turns_ahead_are_counted(topic: MakeTopic, broker: Broker) -> None:
    await topic(fairness="keys")
    await broker.enqueue_batch("jobs", [Outgoing(b"", fairness_key=key) for key in ("acme", "acme", "acme", "other")])
    items = (await broker.explain("jobs")).items
    assert [(item.message.fairness_key, item.turns_ahead) for item in items] == [
        ("acme", 0), ("other", 0), ("acme", 1), ("acme", 2),
    ]  # fmt: skip
    assert "turn of 'acme' after 2 more" in items[-1].text


@pytest.mark.usefixtures("fake_time")
async def test_one_message_is_explained_in_every_state(world: World, topic: MakeTopic, broker: Broker) -> None:
    await topic(max_retries_default=0)
    first, second = await put(broker, 1, 2)
    delayed = (await broker.enqueue("jobs", b"", delay=90)).id
    assert [item.line for id in (first, second) for item in (await broker.explain("jobs", message_id=id)).items] == [
        1,
        2,
    ]

    async def text_of(id: int) -> str:
        (item,) = (await broker.explain("jobs", message_id=id)).items
        assert item.message.id == id
        return item.text

    assert (await text_of(second)).startswith("Second in line: priority 2")
    assert await text_of(delayed) == "Delayed: due in 1 min."
    message = await take(broker, holder="worker-7")
    assert (await text_of(first)).startswith("Leased by 'worker-7': delivery 1, ends in ")
    await message.nack(reason="no disk")
    await world.advance(120)
    assert await text_of(first) == "Dead since 2 min ('no disk'), after 1 delivery."
    await (await take(broker)).ack()
    assert (await text_of(delayed)).startswith("No longer in the queue: acked")
    with pytest.raises(MessageNotFound):
        await broker.explain("jobs", message_id=first + (1 << 40))


async def test_holds_say_why_nothing_is_handed_out(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_inflight=1)
    await put(broker, 1, 2)
    assert (await broker.explain("jobs")).holds == []
    await take(broker)
    (hold,) = (await broker.explain("jobs")).holds
    assert (hold.kind, hold.count) == ("in_flight", 1)
    await broker.pause_topic("jobs")
    found = await broker.explain("jobs")
    assert [hold.kind for hold in found.holds] == ["paused", "in_flight"]
    assert [item.message.priority for item in found.items] == [2]  # the next one, once it may go out


@pytest.mark.feature("partitions")
async def test_throttled_partition_is_a_hold_and_its_messages_are_not_in_line(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=2)
    ids = [(await broker.enqueue("jobs", b"", key=str(n))).id for n in range(16)]
    await broker.set_partition_throttled("jobs", 0, True, "disk")
    found = await broker.explain("jobs", 100)
    held = set(ids) - {item.message.id for item in found.items}
    (hold,) = found.holds
    assert (hold.kind, hold.count, "disk" in hold.text) == ("throttled", len(held), True)
    for id in held:
        (item,) = (await broker.explain("jobs", message_id=id)).items
        assert item.line is None
        assert "partition 0 is throttled ('disk')" in item.text


@pytest.mark.feature("fairness")
async def test_limit_of_a_fairness_key_is_a_hold(topic: MakeTopic, broker: Broker) -> None:
    await topic(fairness="keys", max_inflight_per_key=1)
    await broker.enqueue_batch("jobs", [Outgoing(b"", fairness_key="acme") for _ in range(3)])
    await take(broker)
    found = await broker.explain("jobs")
    assert found.items == []
    assert [(hold.kind, hold.count) for hold in found.holds] == [("fairness", 2)]


async def test_wrong_arguments_are_refused(jobs: Broker) -> None:
    with pytest.raises(BadRequest, match="limit"):
        await jobs.explain("jobs", 101)
    with pytest.raises(TopicNotFound):
        await jobs.explain("nothing")
    assert (await jobs.explain("jobs")).items == []
