"""The app: declaring tasks, enqueueing with and without a loop, and the broker it uses."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.client.tasks.broker_binding import Home, directory_of
from tests.unit.client.tasks.rig import SMALL, World, in_world


@dataclass
class Order:
    id: int


def make_app(tmp_path: Path, **options: Any) -> heapline.App:
    return heapline.App(tmp_path / "data", topics={"jobs": SMALL, "tasks": SMALL}, **options)


def test_creating_an_app_and_its_tasks_connects_to_nothing(tmp_path: Path) -> None:
    app = make_app(tmp_path)

    @app.task(topic="jobs")
    async def send(order: Order) -> None: ...

    assert not (tmp_path / "data").exists()
    assert send.__name__ == "send"
    assert repr(send) == "<Task 'send' on topic 'jobs'>"


async def test_calling_a_task_calls_its_function(tmp_path: Path) -> None:
    app = make_app(tmp_path)

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    @app.task(topic="jobs", name="other")
    def half(n: int) -> int:
        return n // 2

    assert (await double(4), half(4)) == (8, 2)
    assert (double.topic, half.name) == ("tasks", "other")


def test_every_option_of_an_enqueue_reaches_the_broker() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs", priority=3, max_retries=4)
        async def send(order: Order) -> None: ...

        soon = datetime(2026, 1, 2, tzinfo=UTC)
        plain = await send.enqueue(Order(1))
        full = await send.enqueue(Order(2), priority=5, deliver_at=soon, key="k", ttl=60, max_retries=1)
        once = await send.enqueue(order=Order(3), idempotency_key="x", idempotency_scope="until_ack", delay=10)
        again = await send.enqueue(order=Order(3), idempotency_key="x", idempotency_scope="until_ack", delay=10)
        info = await world.broker.get("jobs", plain.id)
        assert (info.priority, info.payload) == (3, b'{"order":{"id":1}}')
        info = await world.broker.get("jobs", full.id)
        assert (info.priority, info.due_at, info.key) == (5, soon, "k")
        assert info.expires_at == soon + timedelta(seconds=60)
        assert (again.id, again.duplicate) == (once.id, True)
        assert (await world.broker.get("jobs", once.id)).state == "delayed"

    in_world(scenario)


def test_fairness_key_reaches_the_broker() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def send(order: Order) -> None: ...

        await world.broker.create_topic("jobs", **SMALL, fairness="keys")
        answer = await send.enqueue(Order(1), fairness_key="tenant")
        assert (await world.broker.get("jobs", answer.id)).fairness_key == "tenant"

    in_world(scenario)


def test_enqueue_many_is_one_atomic_batch() -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def send(order: Order, copy: bool = False) -> None: ...

        answers = await send.enqueue_many([Order(1), send.item(Order(2), copy=True, priority=-1)], priority=7)
        found = [(m.id, m.priority, m.payload) for m in await world.broker.peek("jobs")]
        assert found == [
            (answers[1].id, -1, b'{"order":{"id":2},"copy":true}'),
            (answers[0].id, 7, b'{"order":{"id":1}}'),
        ]
        with pytest.raises(TypeError, match="the worker would reject these arguments"):
            await send.enqueue_many([Order(3), 5])
        assert len(await world.broker.peek("jobs")) == 2
        assert await send.enqueue_many([]) == []
        with pytest.raises(TypeError, match="enqueue_many has no option 'prio'; it has delay, deliver_at, "):
            await send.enqueue_many([Order(1)], prio=1)

    in_world(scenario)


def test_sync_enqueues_need_no_loop(tmp_path: Path) -> None:
    app = make_app(tmp_path)

    @app.task(topic="jobs")
    async def send(order: Order) -> None: ...

    first = send.enqueue_sync(Order(1), priority=2)
    second, third = send.enqueue_many_sync([Order(2), Order(3)])
    assert len({first.id, second.id, third.id}) == 3

    async def look() -> list[int | None]:
        broker = await app.broker()  # of the app's own thread, from another loop
        found = await broker.peek("jobs")
        await app.close()
        return [m.priority for m in found]

    assert asyncio.run(look()) == [0, 0, 2]


async def test_sync_enqueue_in_a_running_loop_is_refused(tmp_path: Path) -> None:
    app = make_app(tmp_path)

    @app.task(topic="jobs")
    async def send(order: Order) -> None: ...

    words = r"send.enqueue_sync would block the running event loop; use `await send.enqueue\(…\)`"
    with pytest.raises(RuntimeError, match=words):
        send.enqueue_sync(Order(1))


def test_directory_can_be_used_by_one_loop_after_another(tmp_path: Path) -> None:
    app = make_app(tmp_path)

    @app.task(topic="jobs")
    async def send(order: Order) -> None: ...

    async def within() -> None:
        async with app:
            await send.enqueue(Order(1))

    async def without() -> None:
        await send.enqueue(Order(2))

    asyncio.run(within())
    asyncio.run(without())
    asyncio.run(without())

    async def count() -> int:
        found = await (await app.broker()).peek("jobs")
        await app.close()
        return len(found)

    assert asyncio.run(count()) == 3


FORK = """
import os, sys, heapline
app = heapline.App("./data")

@app.task(topic="jobs")
async def note(n: int) -> None: ...

note.enqueue_sync(1)
if os.fork() == 0:
    try:
        note.enqueue_sync(2)
    except heapline.DirectoryLocked:
        os._exit(7)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
note.enqueue_sync(3)
"""


def test_child_of_a_fork_shares_nothing_with_its_parent(tmp_path: Path) -> None:
    """The parent owns the directory: the child gets an error instead of waiting for a missing thread."""
    environment = {**os.environ, "PYTHONPATH": str(Path(heapline.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", FORK], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


async def test_failed_opening_is_tried_again(tmp_path: Path) -> None:
    async with heapline.open(tmp_path / "data"):
        app = make_app(tmp_path)

        @app.task(topic="jobs")
        async def send(order: Order) -> None: ...

        with pytest.raises(heapline.DirectoryLocked):
            async with app:
                pass
        with pytest.raises(heapline.DirectoryLocked):
            await send.enqueue(Order(1))
    await send.enqueue(Order(1))
    await app.close()


def test_app_uses_another_broker_within_using() -> None:
    app = heapline.App("nowhere.invalid:1", topics={"jobs": SMALL})

    @app.task(topic="jobs")
    async def send(order: Order) -> None: ...

    async def scenario(world: World) -> None:
        with app.using(world.broker):
            await send.enqueue(Order(1))
        assert len(await world.broker.peek("jobs")) == 1
        assert str(app.home) == "nowhere.invalid:1"

    in_world(scenario)


def test_worker_uses_a_directory_opened_in_the_app_s_thread(tmp_path: Path) -> None:
    """A script that enqueues without a loop first, and then runs a worker."""
    app = make_app(tmp_path)
    said: list[int] = []

    @app.task(topic="jobs")
    async def note(n: int) -> None:
        said.append(n)
        if n == 1:
            await note.enqueue(2)
        else:
            worker.stop()

    note.enqueue_sync(1)
    worker = app.worker()
    totals = asyncio.run(asyncio.wait_for(worker.run(), 30))
    assert (said, totals.done) == ([1, 2], 2)
    asyncio.run(app.close())


# --- what is refused --------------------------------------------------------------------------------------------------


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    app = make_app(tmp_path)

    @app.task
    def one() -> None: ...

    with pytest.raises(ValueError, match=r"task 'one' already exists \(.*\.one\); give this one a name, @app.task"):

        @app.task(name="one")
        def two() -> None: ...


def test_task_redeclared_at_the_same_place_replaces_the_old_one(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    for n in range(2):

        @app.task
        def same(n: int = n) -> None: ...

    assert len(app.tasks) == 1


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"topic": "no such/thing/"}, heapline.BadName, "is not a topic name"),
        ({"timeout": 0}, ValueError, "timeout of task 'one' must be a number of seconds over 0, got 0"),
        ({"timeout": None}, ValueError, "timeout of task 'one' must be a number of seconds over 0, got None"),
    ],
)
def test_bad_task_options_are_refused(tmp_path: Path, options: Any, kind: type[Exception], words: str) -> None:
    def one() -> None: ...

    with pytest.raises(kind, match=words):
        make_app(tmp_path).task(**options)(one)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"concurrency": 0}, "concurrency must be an integer from 1 to 10000, got 0"),
        ({"visibility": 0}, "visibility must be a number of seconds over 0, got 0"),
        ({"grace": -1}, "grace must be a number of seconds from 0, got -1"),
        ({"topics": ["mail"]}, "no task of this app is on topic 'mail'; its topics are jobs"),
    ],
)
async def test_bad_worker_settings_are_refused(tmp_path: Path, settings: Any, words: str) -> None:
    app = make_app(tmp_path)

    @app.task(topic="jobs")
    def one() -> None: ...

    with pytest.raises(heapline.BadRequest, match=words):
        app.worker(**settings)


async def test_app_without_tasks_has_no_worker(tmp_path: Path) -> None:
    with pytest.raises(heapline.BadRequest, match=r"this app has no tasks; declare some with @app\.task"):
        make_app(tmp_path).worker()


def test_bad_targets_are_refused() -> None:
    with pytest.raises(TypeError, match="target of an App must be a server, a directory or a broker, got 5"):
        heapline.App(5)  # type: ignore[arg-type]
    for target in (None, "./data"):
        with pytest.raises(ValueError, match="api_key needs the server that it is for; write App"):
            heapline.App(target, api_key="k")
    with pytest.raises(ValueError, match='unknown must be "retry" or "bury", got \'drop\''):
        heapline.App(unknown="drop")  # type: ignore[arg-type]


async def test_topics_are_not_created_if_the_app_disables_it(tmp_path: Path) -> None:
    app = make_app(tmp_path, create_topics=False)

    @app.task(topic="jobs")
    def one() -> None: ...

    async with app:
        with pytest.raises(heapline.TopicNotFound):
            await one.enqueue()
        with pytest.raises(heapline.TopicNotFound):
            await one.enqueue_many([one.item()])
        with pytest.raises(heapline.TopicNotFound):
            await app.worker().run()


# --- targets ----------------------------------------------------------------------------------------------------------


def test_directory_targets_are_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for target in ("./x", "a/b", "data", Path("anything")):
        assert directory_of(target) == Path(target)
    for target in ("localhost", "localhost:7400", "heapline+tls://q:7400", "[::1]:7400", None):
        assert directory_of(target) is None


def test_app_without_a_target_uses_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEAPLINE_URL", "heapline://queue:7400")
    assert str(Home()) == "heapline://queue:7400"
    assert str(Home("localhost:1")) == "localhost:1"
    assert str(Home(Path("data"))) == "data"
    assert os.environ["HEAPLINE_URL"]
