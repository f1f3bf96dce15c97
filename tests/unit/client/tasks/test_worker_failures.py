"""Worker failures: cancellation, a topic deleted during an outage, clock jumps, handlers that swallow errors."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

import heapline
from heapline.client.tasks.broker_binding import Home
from heapline.contract.errors import TopicNotFound, UnavailableError
from tests.unit.client.tasks.rig import World, in_world


def test_cancelled_worker_stops_its_handlers_and_releases_their_messages() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def nap() -> None:
            try:
                await asyncio.sleep(1000)
            finally:
                world.said.append("stopped")

        answer = await nap.enqueue()
        worker = world.app.worker()
        running = asyncio.ensure_future(worker.run())
        await world.until(lambda: worker.running == 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert world.said == ["stopped"]
        assert await world.counts() == (1, 0, 0, 0)
        assert (await world.broker.get("jobs", answer.id)).attempts == 0

    in_world(scenario)


def test_deleted_topic_is_recreated_even_during_an_outage() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def note() -> None:
            world.said.append("done")

        pop, make = world.broker.pop, world.broker.create_topic
        failures: list[tuple[str, Exception]] = [
            ("pop", TopicNotFound("jobs")), ("make", UnavailableError("away")), ("pop", TopicNotFound("jobs")),
        ]  # fmt: skip

        def failing(name: str, method: Any) -> Any:
            async def call(*args: Any, **options: Any) -> Any:
                if failures and failures[0][0] == name:
                    raise failures.pop(0)[1]
                return await method(*args, **options)

            return call

        await note.enqueue()
        world.broker.pop = failing("pop", pop)  # type: ignore[method-assign]
        world.broker.create_topic = failing("make", make)  # type: ignore[method-assign]
        async with world.worker() as worker:
            await world.until(lambda: worker.totals.done == 1)
        assert failures == []

    in_world(scenario)


def test_clock_jump_of_the_broker_does_not_lengthen_a_workers_lease() -> None:
    async def scenario(world: World) -> None:
        loop = asyncio.get_running_loop()

        @world.app.task(topic="jobs")
        async def work() -> None:
            begun = loop.time()
            try:
                await asyncio.sleep(10_000)
            finally:
                world.said.append(loop.time() - begun)

        extend, calls = world.broker.extend, 0

        async def jumping(messages: Any, seconds: float) -> None:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise UnavailableError("away")
            await extend(messages, seconds)
            for message in messages:
                message._deadline_ms += 3_600_000

        await work.enqueue(max_retries=0)
        world.broker.extend = jumping  # type: ignore[method-assign]
        async with world.worker(visibility=30) as worker:
            await world.until(lambda: world.said)
        assert 35 < world.said[0] <= 41  # extended once, after 10 s, for 30
        assert worker.totals.lost == 1

    in_world(scenario)


def test_leases_are_extended_while_a_worker_drains() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def nap() -> None:
            await asyncio.sleep(500)
            world.said.append("whole")

        await nap.enqueue()
        async with world.worker(visibility=30, grace=1000) as worker:
            await world.until(lambda: worker.running == 1)
            worker.stop()
            for _ in range(9):
                await asyncio.sleep(50)
                assert await world.broker.pop("jobs") == []
        assert world.said == ["whole"]
        assert worker.totals.lost == 0
        assert await world.is_empty()

    in_world(scenario)


def test_handler_that_swallows_a_lost_lease_is_settled_once() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def stubborn() -> None:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                world.said.append("swallowed")
                raise ValueError("an error that is not from the broker") from None

        await stubborn.enqueue()
        async with world.worker(visibility=30, concurrency=1) as worker:
            await world.until(lambda: worker.running == 1)
            (run,) = worker._runner.running  # type: ignore[union-attr]
            await world.broker.bury(run.lease.message, reason="by another")
            await world.until(lambda: world.said and not worker.running)
            assert worker.totals.retried == worker.totals.buried == worker.totals.done == 0
            assert worker.slots.free == 0 or worker.slots.free == 1  # its slot is free, or waits for work
        (dead,) = await world.broker.dlq_list("jobs")
        assert dead.reason == "by another"

    in_world(scenario)


def test_app_keeps_no_broker_of_a_closed_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Like asgiref's async_to_sync in Django: one loop per call."""

    class Client:
        alive = 0

        def __init__(self) -> None:
            Client.alive += 1

        def __del__(self) -> None:
            Client.alive -= 1

        async def __aenter__(self) -> Client:
            return self

    monkeypatch.setattr("heapline.client.tasks.broker_binding.make_client", lambda url, api_key=None: Client())
    home = Home("localhost:7400")

    async def use() -> None:
        assert await home.broker() is await home.broker()

    for _ in range(20):
        asyncio.run(use())
    gc.collect()
    assert Client.alive <= 2


def test_retry_rule_for_a_parent_class_does_not_hide_the_one_for_its_child() -> None:
    rules = heapline.App(None).task(topic="t", retry_on={OSError: 5.0, ConnectionError: 1.0})(_nothing).rules
    assert rules.decide(ConnectionResetError("x"), 1, 0.0).backoff == 1.0
    assert rules.decide(FileNotFoundError("x"), 1, 0.0).backoff == 5.0


async def _nothing() -> None: ...
