"""SubscriptionHelper on a real server: delivery, return of messages, and repair."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry

from heapline.assign.errors import BadConfig
from heapline.assign.partitions import Partition
from heapline.assign.subscriptions import SubscriptionConfig, SubscriptionHelper
from tests.integration.nats_rig import Servers

ONE, TWO = Partition(("tool1", "a")), Partition(("tool1", "b"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Servers(tmp_path_factory.mktemp("nats"), 1) as servers:
        yield servers.urls[0]


class World:
    """A stream, a worker's `holds`, and the recorded handler calls."""

    def __init__(self, client: Client) -> None:
        self.client, self.stream = client, secrets.token_hex(6)
        self.held: set[Partition] = {ONE, TWO}
        self.got: list[tuple[str, str]] = []
        self.errors: list[Exception] = []
        self.helpers: list[SubscriptionHelper] = []

    async def make_stream(self) -> None:
        await self.client.jetstream().add_stream(name=self.stream, subjects=[f"{self.stream}.>"])

    def config(self, **given: Any) -> SubscriptionConfig:
        return SubscriptionConfig(
            **{"stream": self.stream, "subject_prefix": self.stream, "retry_backoff": 0.02, **given}
        )

    def helper(self, **given: Any) -> SubscriptionHelper:
        helper = SubscriptionHelper(
            self.client, self.config(**given), holds=lambda p: p in self.held, on_error=self.errors.append
        )
        self.helpers.append(helper)
        return helper

    async def publish(self, partition: Partition, *texts: str) -> None:
        for text in texts:
            await self.client.jetstream().publish(partition.subject(self.stream), text.encode())

    async def note(self, partition: Partition, message: Msg) -> None:
        self.got.append((partition.id, message.data.decode()))

    async def unanswered(self, helper: SubscriptionHelper, partition: Partition) -> tuple[int, int]:
        """Return the number of delivered but unacknowledged messages, and of undelivered ones."""
        name = helper._config.consumer(partition)
        info = await self.client.jetstream().consumer_info(self.stream, name)
        return info.num_ack_pending or 0, info.num_pending or 0


@pytest.fixture
async def world(url: str) -> AsyncIterator[World]:
    client = await nats.connect(url)
    world = World(client)
    await world.make_stream()
    yield world
    for helper in world.helpers:
        await helper.close()
    await client.close()


async def until(is_so: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while True:
            found = is_so()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.02)


async def test_each_partitions_messages_arrive_in_order_and_are_acked(world: World) -> None:
    helper = world.helper()
    await world.publish(ONE, "1", "2", "3")
    await helper.update_subscriptions([ONE, TWO], [], world.note)
    await world.publish(TWO, "4")
    await until(lambda: len(world.got) == 4)
    assert [text for id, text in world.got if id == ONE.id] == ["1", "2", "3"]
    assert (TWO.id, "4") in world.got

    async def is_acked() -> bool:
        return await world.unanswered(helper, ONE) == (0, 0)

    await until(is_acked)
    health = helper.health()
    assert (health.wanted, health.active, health.failing, health.delivered) == (2, 2, 0, 4)


async def test_nothing_is_delivered_for_an_unheld_partition(world: World) -> None:
    helper = world.helper()
    world.held = {TWO}
    await world.publish(ONE, "1")
    await world.publish(TWO, "2")
    await helper.update_subscriptions([ONE, TWO], [], world.note)
    await until(lambda: world.got)
    assert world.got == [(TWO.id, "2")]
    assert helper.health().active == 1
    world.held.add(ONE)
    await until(lambda: len(world.got) == 2)
    assert world.got[1] == (ONE.id, "1")


async def test_lease_ending_between_messages_leaves_the_rest_for_the_next_holder(world: World) -> None:
    async def lose(partition: Partition, message: Msg) -> None:
        await world.note(partition, message)
        world.held.discard(ONE)

    helper = world.helper()
    await world.publish(ONE, "1", "2", "3")
    await helper.update_subscriptions([ONE], [], lose)
    await until(lambda: len(world.got) > 0)

    # The first message was not acked either: the partition's current holder may have it already.
    async def are_back() -> bool:
        waiting, unread = await world.unanswered(helper, ONE)
        return waiting + unread == 3

    await until(are_back)  # returned or never fetched, depending on how many arrived at a time
    assert world.got == [(ONE.id, "1")]


async def test_removal_waits_for_the_running_handler_and_returns_the_rest(world: World) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow(partition: Partition, message: Msg) -> None:
        begun.set()
        await may_end.wait()
        await world.note(partition, message)

    leaving, coming = world.helper(), world.helper()
    await world.publish(ONE, "1", "2", "3")
    await leaving.update_subscriptions([ONE], [], slow)
    await begun.wait()
    removing = asyncio.create_task(leaving.update_subscriptions([], [ONE], slow))
    done, _ = await asyncio.wait([removing], timeout=0.1)
    assert not done, "a handler was still running"
    may_end.set()
    await removing
    assert world.got == [(ONE.id, "1")]
    assert leaving.health().wanted == 0
    async with asyncio.timeout(10):  # ack_wait is 30 s: a lost message would be redelivered only then
        await coming.update_subscriptions([ONE], [], world.note)
        await until(lambda: len(world.got) == 3)
    assert sorted(text for _, text in world.got) == ["1", "2", "3"]


async def test_message_whose_handler_raised_is_redelivered(world: World) -> None:
    tries = 0

    async def fail_once(partition: Partition, message: Msg) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("not yet")
        await world.note(partition, message)

    helper = world.helper()
    await world.publish(ONE, "1")
    await helper.update_subscriptions([ONE], [], fail_once)
    await until(lambda: world.got)
    assert (tries, helper.health().handler_failures) == (2, 1)
    assert [str(error) for error in world.errors] == ["not yet"]


async def test_handler_may_ack_its_message(world: World) -> None:
    async def terminate(partition: Partition, message: Msg) -> None:
        await world.note(partition, message)
        await message.term()

    helper = world.helper()
    await world.publish(ONE, "1", "2")
    await helper.update_subscriptions([ONE], [], terminate)
    await until(lambda: len(world.got) == 2)
    assert world.errors == []


async def test_failed_subscription_is_suspended_after_retries_until_reconciled(
    world: World,
) -> None:
    await world.client.jetstream().delete_stream(world.stream)
    helper = world.helper(max_retries=2)
    await helper.update_subscriptions([ONE], [], world.note)
    await until(lambda: helper.health().failing == 1)
    assert helper.health().retries == 3
    await world.make_stream()
    await world.publish(ONE, "1")
    await helper.reconcile()
    await until(lambda: world.got)
    health = helper.health()
    assert (health.active, health.failing, health.repaired) == (1, 0, 1)


async def test_removal_of_a_failing_subscription_does_not_wait(world: World) -> None:
    await world.client.jetstream().delete_stream(world.stream)
    helper = world.helper(max_retries=0)
    await helper.update_subscriptions([ONE, TWO], [], world.note)
    await until(lambda: helper.health().failing == 2)
    async with asyncio.timeout(10):
        await helper.update_subscriptions([], [ONE, TWO], world.note)
    assert helper.health().wanted == 0


async def test_deleted_consumer_is_recreated_automatically(world: World) -> None:
    helper = world.helper(reconcile_interval=0.05)
    await helper.update_subscriptions([ONE], [], world.note)
    await until(lambda: helper.health().active == 1)
    await world.client.jetstream().delete_consumer(world.stream, helper._config.consumer(ONE))
    await world.publish(ONE, "1")
    await until(lambda: world.got)
    assert world.got == [(ONE.id, "1")]


async def test_repeating_an_update_changes_nothing(world: World) -> None:
    helper = world.helper()
    for _ in range(2):
        await helper.update_subscriptions([ONE], [TWO], world.note)
    await world.publish(ONE, "1")
    await until(lambda: world.got)
    assert helper.partitions == (ONE,)
    assert helper.health().delivered == 1


async def test_health_is_exported_to_the_registry(world: World) -> None:
    helper, registry = world.helper(), CollectorRegistry()
    helper.register_metrics("m", registry)
    await world.publish(ONE, "1")
    await helper.update_subscriptions([ONE], [], world.note)
    await until(lambda: world.got)
    assert registry.get_sample_value("parti_subscriptions_wanted", {"manager": "m"}) == 1
    assert registry.get_sample_value("parti_subscription_delivered_total", {"manager": "m"}) == 1


async def test_partition_subscribed_from_another_thread_is_delivered(world: World) -> None:
    helper = world.helper()
    await world.publish(ONE, "1")
    await asyncio.to_thread(lambda: asyncio.run(helper.update_subscriptions([ONE], [], world.note)))
    await until(lambda: world.got == [(ONE.id, "1")])
    await asyncio.to_thread(lambda: asyncio.run(helper.close()))
    assert helper.partitions == ()


async def test_close_leaves_no_tasks(world: World) -> None:
    helper = world.helper()
    await helper.update_subscriptions([ONE, TWO], [], world.note)
    await until(lambda: helper.health().active == 2)
    await helper.close()
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("assign")] == []


async def test_plain_function_is_rejected_as_handler(world: World) -> None:
    handler: Any = lambda partition, message: None  # noqa: E731
    with pytest.raises(BadConfig, match="async def"):
        await world.helper().update_subscriptions([ONE], [], handler)


def test_consumers_of_different_partitions_have_different_names() -> None:
    config = SubscriptionConfig(stream="work")
    partitions = [
        Partition(keys) for keys in (("a_b", "c"), ("a", "b_c"), ("a", "b", "c"), ("ä",), ("ö",), ("x" * 200,))
    ]
    names = {config.consumer(partition) for partition in partitions}
    assert len(names) == len(partitions)
    assert all(name.isascii() and "." not in name and len(name) < 200 for name in names)


@pytest.mark.parametrize(
    "wrong",
    [{"stream": "a.b"}, {"stream": ""}, {"consumer_prefix": "a b"}, {"batch": 0}, {"batch": True}, {"max_retries": -1},
     {"ack_wait": 0}, {"reconcile_interval": "0s"}, {"retry_backoff": "soon"}],
)  # fmt: skip
def test_malformed_config_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadConfig):
        SubscriptionConfig(**{"stream": "work", **wrong})


async def test_subscription_survives_a_pause_in_which_the_lease_ends(world: World) -> None:
    helper = world.helper()
    await helper.update_subscriptions([ONE], [], world.note)
    await until(lambda: helper.health().active == 1)
    world.held.discard(ONE)
    await world.publish(ONE, "1")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            await until(lambda: world.got)
    assert world.got == []
    world.held.add(ONE)
    await until(lambda: world.got)
