"""A worker in virtual time: what it runs, how it settles messages, extends leases and ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import heapline
from heapline.client.tasks import Call
from heapline.client.tasks.task import Next, Sending
from tests.unit.client.tasks.rig import SMALL, World, in_world


def test_task_is_acked_when_its_handler_returns() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def add(a: int, b: int = 2) -> int:
            world.said.append((a, b))
            return a + b

        await add.enqueue(1)
        await add.enqueue(3, b=4)
        async with world.worker() as worker:
            await world.until(lambda: worker.totals.done == 2)
        assert sorted(world.said) == [(1, 2), (3, 4)]
        assert await world.is_empty()

    in_world(scenario)


def test_messages_run_in_order_of_priority() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def note(n: int) -> None:
            world.said.append(n)

        await note.enqueue_many([note.item(n, priority=n) for n in (5, 1, 4, 2, 3)])
        async with world.worker(concurrency=1) as worker:
            await world.until(lambda: worker.totals.done == 5)
        assert world.said == [1, 2, 3, 4, 5]

    in_world(scenario)


@pytest.mark.parametrize("concurrency", [3, 41])  # one pop for all slots, and two for half of them each
def test_worker_leases_at_most_its_free_slots(concurrency: int) -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def nap(n: int) -> None:
            await asyncio.sleep(100)

        await nap.enqueue_many(range(50))
        async with world.worker(concurrency=concurrency, grace=1000) as worker:
            await world.until(lambda: worker.running == concurrency)
            await asyncio.sleep(10)
            assert (await world.counts())[2] == concurrency
        assert await world.counts() == (
            50 - concurrency,
            0,
            0,
            0,
        )  # drained: running handlers finished, no new ones started

    in_world(scenario)


def test_topic_with_much_work_does_not_starve_another() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def slow(n: int) -> None:
            await asyncio.sleep(10)

        @world.app.task(topic="other")
        async def rare() -> None:
            world.said.append("rare")

        await slow.enqueue_many(range(100))
        async with world.worker(concurrency=2, grace=0) as worker:
            await world.until(lambda: worker.running == 2)
            await rare.enqueue()
            await world.until(lambda: world.said, seconds=15)

    in_world(scenario)


def test_failed_handler_is_retried_after_its_backoff_with_its_reason() -> None:
    async def scenario(world: World) -> None:
        loop = asyncio.get_running_loop()

        @world.app.task(topic="jobs", retry_on={OSError: heapline.Backoff(base=40, jitter=0)})
        async def flaky() -> None:
            world.said.append(loop.time())
            if len(world.said) < 3:
                raise ConnectionError("the other side hung up")

        answer = await flaky.enqueue()
        async with world.worker() as worker:
            await world.until(lambda: worker.totals.retried == 1)
            info = await world.broker.get("jobs", answer.id)
            assert (info.state, info.reason) == ("delayed", "ConnectionError: the other side hung up")
            await world.until(lambda: worker.totals.done == 1)
        first, second, third = world.said
        assert 40 <= second - first < 41
        assert 80 <= third - second < 81

    in_world(scenario)


def test_bury_and_bury_on_create_dead_letters_immediately() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs", bury_on=(ValueError,))
        async def bad(how: str) -> None:
            if how == "raise":
                raise UnicodeError("no such letter")
            raise heapline.Bury("nobody lives there")

        await bad.enqueue("raise")
        await bad.enqueue("bury")
        async with world.worker() as worker:
            await world.until(lambda: worker.totals.buried == 2)
        reasons = {info.reason for info in await world.broker.dlq_list("jobs")}
        assert reasons == {"UnicodeError: no such letter", "nobody lives there"}

    in_world(scenario)


def test_max_retries_of_a_task_limits_its_retries() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs", max_retries=2)
        async def never() -> None:
            world.said.append(1)
            raise heapline.Retry(delay=1)

        await never.enqueue()
        async with world.worker() as worker:
            await world.until(lambda: worker.totals.retried == 3)
        assert len(world.said) == 3
        (dead,) = await world.broker.dlq_list("jobs")
        assert dead.reason == "the handler asked for a retry"

    in_world(scenario)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b'{"n": "secret"}', "the payload is not a call of task 'note': Expected `int`, got `str` - at `$.n`"),
        (b"{", "the payload is not a call of task 'note': Input data was truncated"),
        (b'{"n": 1, "m": 2}', "the payload is not a call of task 'note': Object contains unknown field `m`"),
        (b"{}", "the payload is not a call of task 'note': Object missing required field `n`"),
    ],
)
def test_message_with_invalid_arguments_is_buried_with_the_reason(payload: bytes, reason: str) -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def note(n: int) -> None: ...

        await world.broker.create_topic("jobs", **SMALL)
        await world.broker.enqueue("jobs", payload)
        async with world.worker() as worker:
            await world.until(lambda: worker.totals.buried == 1)
        assert [info.reason for info in await world.broker.dlq_list("jobs")] == [reason]

    in_world(scenario)


def test_message_without_a_task_name_belongs_to_the_only_task_of_its_topic() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def note(n: int) -> None:
            world.said.append(n)

        await world.broker.create_topic("jobs", **SMALL)
        await world.broker.enqueue("jobs", b'{"n": 7}')
        async with world.worker() as worker:
            await world.until(lambda: worker.totals.done == 1)
        assert world.said == [7]

    in_world(scenario)


def test_message_of_an_unknown_task_is_retried_then_dies_with_the_reason() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def one() -> None: ...

        @world.app.task(topic="jobs")
        async def two() -> None: ...

        await world.broker.create_topic("jobs", **SMALL)
        await world.broker.enqueue("jobs", b"{}", headers={"heapline-task": "three"}, max_retries=1)
        await world.broker.enqueue("jobs", b"{}", max_retries=0)
        async with world.worker() as worker:
            await world.until(lambda: worker.totals.retried == 3)
        reasons = {info.reason for info in await world.broker.dlq_list("jobs")}
        assert reasons == {"this app has no task 'three'", "the message names no task, and its topic has several"}

    in_world(scenario)


def test_unknown_task_is_buried_immediately_if_configured() -> None:
    async def scenario(world: World) -> None:
        world.app = heapline.App(world.broker, topics={"jobs": SMALL}, unknown="bury")

        @world.app.task(topic="jobs")
        async def one() -> None: ...

        await world.broker.create_topic("jobs", **SMALL)
        await world.broker.enqueue("jobs", b"{}", headers={"heapline-task": "three"})
        async with world.worker() as worker:
            await world.until(lambda: worker.totals.buried == 1)

    in_world(scenario)


# --- leases and time --------------------------------------------------------------------------------------------------


def test_leases_of_a_day_long_handler_are_kept_by_a_heartbeat() -> None:
    async def scenario(world: World) -> None:
        await world.broker.create_topic("jobs", **SMALL, lease_max=2 * 86400)

        @world.app.task(topic="jobs", timeout=2 * 86400)
        async def long(n: int) -> None:
            world.said.append(n)
            await asyncio.sleep(86400)

        await long.enqueue_many(range(5))
        extends = 0
        real = world.broker.extend

        async def counted(messages: object, seconds: float) -> None:
            nonlocal extends
            extends += 1
            await real(messages, seconds)  # type: ignore[arg-type]

        world.broker.extend = counted  # type: ignore[method-assign, assignment]
        async with world.worker(visibility=900) as worker:
            await world.until(lambda: worker.totals.done == 5, seconds=90000)
            assert worker.totals.lost == 0
        assert sorted(world.said) == [0, 1, 2, 3, 4]  # each once
        assert extends in range(286, 292)  # one call for all of them, after each third of the visibility
        assert await world.is_empty()

    in_world(scenario)


def test_hung_async_handler_is_cancelled_at_its_timeout_and_retried() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs", timeout=60, max_retries=0)
        async def hang() -> None:
            try:
                await asyncio.sleep(1e6)
            finally:
                world.said.append("cancelled")

        await hang.enqueue()
        async with world.worker() as worker:
            await world.until(lambda: worker.totals.timed_out == 1)
            await world.until(lambda: worker.running == 0)
            await world.until(lambda: worker.totals.retried == 1)
        assert world.said == ["cancelled"]
        (dead,) = await world.broker.dlq_list("jobs")
        assert dead.reason == "TimeoutError: the handler took longer than its timeout of 60 s"

    in_world(scenario)


def test_coroutine_that_ignores_cancellation_is_abandoned_and_frees_its_slot() -> None:
    async def scenario(world: World) -> None:
        free = asyncio.Event()

        @world.app.task(topic="jobs", timeout=60)
        async def stubborn() -> None:
            world.said.append(1)
            while len(world.said) == 1 and not free.is_set():
                try:
                    await free.wait()
                except asyncio.CancelledError:
                    continue

        await stubborn.enqueue()
        async with world.worker(concurrency=1, visibility=30) as worker:
            await world.until(lambda: worker.totals.abandoned == 1)
            await world.until(lambda: worker.totals.done == 1)  # the same message, after its lease expired
            free.set()
            await world.until(lambda: worker.totals.abandoned == 0)
        assert worker.totals.timed_out == 1
        assert await world.is_empty()

    in_world(scenario)


def test_lost_lease_cancels_the_handler() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def work() -> None:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                world.said.append("cancelled")
                raise

        await world.broker.create_topic("jobs", **SMALL, lease_max=60)
        answer = await work.enqueue(max_retries=0)
        async with world.worker(visibility=30) as worker:
            await world.until(lambda: worker.totals.lost == 1)
            await world.until(lambda: world.said)
            info = await world.broker.get("jobs", answer.id)
            assert info.state == "dead"
        assert worker.totals.done == 0

    in_world(scenario)


def test_handler_continues_after_a_lost_lease_if_configured() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def work() -> None:
            await asyncio.sleep(100)
            world.said.append("finished")

        await world.broker.create_topic("jobs", **SMALL, lease_max=60)
        await work.enqueue(max_retries=0)
        async with world.worker(visibility=30, cancel_when_lost=False) as worker:
            await world.until(lambda: world.said)
        assert (worker.totals.lost, worker.totals.done) == (1, 0)

    in_world(scenario)


def test_unextendable_lease_counts_as_lost_when_it_expires() -> None:
    async def scenario(world: World) -> None:
        loop = asyncio.get_running_loop()

        @world.app.task(topic="jobs")
        async def work() -> None:
            begun = loop.time()
            try:
                await asyncio.sleep(1000)
            finally:
                world.said.append(loop.time() - begun)

        async def unreachable(messages: object, seconds: float) -> None:
            raise heapline.DeadlineExceeded("extend")

        await work.enqueue(max_retries=0)
        world.broker.extend = unreachable  # type: ignore[method-assign, assignment]
        async with world.worker(visibility=30) as worker:
            await world.until(lambda: world.said)
        assert 29 < world.said[0] <= 31
        assert worker.totals.lost == 1

    in_world(scenario)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_drain_finishes_running_handlers_and_stops_leasing() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def nap(n: int) -> None:
            await asyncio.sleep(20)
            world.said.append(n)

        await nap.enqueue_many(range(4))
        async with world.worker(concurrency=2, grace=30) as worker:
            await world.until(lambda: worker.running == 2)
        assert len(world.said) == 2
        assert await world.counts() == (2, 0, 0, 0)

    in_world(scenario)


def test_drain_releases_messages_after_the_grace_without_an_attempt() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def nap() -> None:
            await asyncio.sleep(1000)

        answer = await nap.enqueue()
        async with world.worker(grace=5) as worker:
            await world.until(lambda: worker.running == 1)
        assert worker.totals.released == 1
        assert await world.counts() == (1, 0, 0, 0)
        assert (await world.broker.get("jobs", answer.id)).attempts == 0

    in_world(scenario)


def test_drain_releases_a_message_that_waits_for_a_slot() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def nap() -> None:
            await asyncio.sleep(10)

        @world.app.task(topic="other")
        async def rare() -> None:
            world.said.append("rare")

        async with world.worker(concurrency=1) as worker:
            await asyncio.sleep(1)  # it waits for both topics
            await nap.enqueue()
            await world.until(lambda: worker.running == 1)
            await rare.enqueue()
            await world.until(lambda: _is_leased(world))
        assert world.said == []
        assert await world.counts("other") == (1, 0, 0, 0)

    in_world(scenario)


async def _is_leased(world: World) -> bool:
    return (await world.counts("other"))[2] == 1


def test_worker_with_too_many_abandoned_runs_stops() -> None:
    async def scenario(world: World) -> None:
        free = asyncio.Event()

        @world.app.task(topic="jobs", timeout=1)
        async def stubborn() -> None:
            while not free.is_set():
                try:
                    await free.wait()
                except asyncio.CancelledError:
                    continue

        await stubborn.enqueue()
        worker = world.app.worker(concurrency=1, abandoned_max=1, grace=0)
        running = asyncio.ensure_future(worker.run())
        await world.until(running.done)
        assert worker.is_worn_out
        free.set()

    in_world(scenario)


def test_worker_waits_for_an_unavailable_broker() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def note() -> None: ...

        real, tries = world.broker.list_topics, 0

        async def unreachable() -> list[heapline.TopicInfo]:
            nonlocal tries
            tries += 1
            if tries < 4:
                raise heapline.DeadlineExceeded("list_topics")
            return await real()

        world.broker.list_topics = unreachable  # type: ignore[method-assign]
        await note.enqueue()
        async with world.worker() as worker:
            await world.until(lambda: worker.totals.done == 1)
        assert tries == 4

    in_world(scenario)


@pytest.mark.parametrize("seed", range(5))
def test_worker_ends_when_stopped_while_the_broker_does_not_answer(seed: int) -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def note() -> None: ...

        @world.app.task(topic="other")
        async def more() -> None: ...

        async def unreachable(*_: object, **__: object) -> list[heapline.Message]:
            raise heapline.DeadlineExceeded("pop")

        world.broker.pop = unreachable  # type: ignore[method-assign, assignment]
        async with world.worker():
            await asyncio.sleep(3 + seed / 7)

    in_world(scenario, seed)


def test_redelivery_to_the_same_worker_ends_the_run_of_its_lost_lease() -> None:
    async def scenario(world: World) -> None:
        loop = asyncio.get_running_loop()

        @world.app.task(topic="jobs")
        async def work() -> None:
            world.said.append(("begun", round(loop.time())))
            try:
                await asyncio.sleep(25)
            finally:
                world.said.append(("ended", round(loop.time())))

        await world.broker.create_topic("jobs", **SMALL, backoff={"base": 0})
        await work.enqueue()
        real = world.broker.extend

        async def deaf(messages: Any, seconds: float) -> None:
            if loop.time() < 13:  # as if it had been answered; only the second pop reports the loss
                for message in messages:
                    message._deadline_ms += 10_000
                return
            await real(messages, seconds)

        world.broker.extend = deaf  # type: ignore[method-assign]
        async with world.worker(visibility=12) as worker:
            await world.until(lambda: worker.totals.done == 1)
        assert [what for what, _ in world.said] == ["begun", "ended", "begun", "ended"]
        assert 12 <= world.said[1][1] == world.said[2][1] < 14  # the first is cancelled as the second begins
        assert worker.totals.lost == 1

    in_world(scenario)


def test_timeout_longer_than_lease_max_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs", timeout=100)
        async def long() -> None: ...

        await world.broker.create_topic("jobs", **SMALL, lease_max=60)
        async with world.worker():
            await asyncio.sleep(1)

    in_world(scenario)
    assert "task may outlast its lease; raise its topic's lease_max, or lower its timeout task='long'" in caplog.text


def test_handler_that_blocks_the_loop_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def compute() -> None:
            await asyncio.sleep(1)
            asyncio.get_running_loop().clock.advance(16)  # type: ignore[attr-defined]

        await compute.enqueue()
        async with world.worker(visibility=30) as worker:
            await world.until(lambda: worker.totals.done == 1)

    in_world(scenario)
    assert "event loop was blocked, so leases could not be extended; declare handlers" in caplog.text


def test_worker_stopped_before_its_broker_was_reached_ends() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def note() -> None: ...

        async def never() -> list[heapline.TopicInfo]:
            await asyncio.sleep(1e9)
            return []

        world.broker.list_topics = never  # type: ignore[method-assign]
        async with world.worker():
            await asyncio.sleep(5)

    in_world(scenario)


def test_worker_without_the_consume_right_finishes_then_fails() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def note() -> None:
            await asyncio.sleep(10)
            world.said.append("finished")

        await note.enqueue()
        real = world.broker.pop

        async def revoked(*args: Any, **kwargs: Any) -> list[heapline.Message]:
            if world.said or worker.running:
                raise heapline.PermissionDenied("a key", "consume", "jobs")
            return await real(*args, **kwargs)

        world.broker.pop = revoked  # type: ignore[method-assign]
        worker = world.app.worker()
        with pytest.raises(heapline.PermissionDenied):
            await worker.run()
        assert world.said == ["finished"]
        assert await world.is_empty()

    in_world(scenario)


# --- around runs ------------------------------------------------------------------------------------------------------


def test_first_declared_middleware_is_outermost() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def note(n: int) -> str:
            world.said.append(n)
            return "result"

        @world.app.middleware
        async def outer(call: Call, following: Next) -> object:
            world.said.append(("outer", call.task.name, call.attempt, call.message.topic))
            result = await following(call)
            world.said.append(result)
            return result

        @world.app.middleware
        async def inner(call: Call, following: Next) -> object:
            call.arguments["n"] += 1
            return await following(call)

        await note.enqueue(1)
        async with world.worker() as worker:
            await world.until(lambda: worker.totals.done == 1)
        assert world.said == [("outer", "note", 1, "jobs"), 2, "result"]

    in_world(scenario)


def test_on_enqueue_may_change_headers_and_options() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def note(n: int) -> None: ...

        @world.app.on_enqueue
        def stamp(sending: Sending) -> None:
            sending.headers["tenant"] = f"t{sending.arguments['n']}"
            sending.options["priority"] = 9

        await note.enqueue_many([1, 2])
        found = await world.broker.peek("jobs")
        assert [(m.headers["tenant"], m.priority) for m in found] == [("t1", 9), ("t2", 9)]
        assert found[0].headers["content-type"] == "application/json"
        assert found[0].headers["heapline-task"] == "note"

    in_world(scenario)
