"""The contract's tests run on every broker in `worlds.WORLDS`; a test uses `world` or just its `broker`.

A module marked `feature("groups")` runs on the brokers that declare this feature in `describe()`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from heapline.contract.broker import Broker
from heapline.contract.message import TopicInfo
from tests.conformance.worlds import LONG_WORLDS, WORLDS, World, has_feature

MakeTopic = Callable[..., Awaitable[TopicInfo]]


@pytest.fixture(params=[*sorted(WORLDS), *(pytest.param(name, marks=pytest.mark.soak) for name in LONG_WORLDS)])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    kind = {**WORLDS, **LONG_WORLDS}[request.param]
    modules = getattr(kind, "modules", None)
    if modules is not None and request.module.__name__.rpartition(".")[2] not in modules:
        pytest.skip("this world runs only part of the suite")
    if request.node.originalname in getattr(kind, "not_run", ()):
        pytest.skip("this world differs here; its class says why")
    world = kind(tmp_path)
    needed = {mark.args[0] for mark in request.node.iter_markers("feature")}
    missing = needed - world.features
    if missing:
        pytest.skip(f"this broker does not declare {', '.join(sorted(missing))}")
    await world.start()
    yield world
    await world.stop()


@pytest.fixture
def broker(world: World) -> Broker:
    return world.broker


@pytest.fixture
def topic(world: World) -> MakeTopic:
    """Create a cheap topic: `await topic()` is "jobs", `await topic("other", mode="max")` another.

    On a broker without partitions the topic has none: a test about their number has the mark
    `feature("partitions")`.
    """

    async def make(name: str = "jobs", **config: object) -> TopicInfo:
        if config.get("partitions") in range(2, 1025) and not await has_feature(world.broker, "partitions"):
            del config["partitions"]
        return await world.broker.create_topic(name, **{**world.small, **config})

    return make


@pytest.fixture
async def jobs(world: World, topic: MakeTopic) -> Broker:
    """A broker with a topic "jobs" of default settings."""
    await topic()
    return world.broker


@pytest.fixture
def fake_time(world: World) -> None:
    """For tests that advance the clock by hours."""
    if not world.controls_time:
        pytest.skip("this world cannot advance its broker's clock")


@pytest.fixture
def colliding_ids(world: World) -> None:
    """For tests in which messages of two topics have the same integer."""
    if not world.ids_collide:
        pytest.skip("this broker never uses an integer twice, even in different topics")


@pytest.fixture
def bare_log(world: World) -> None:
    """For tests that count every row of the log."""
    if not world.log_is_bare:
        pytest.skip("this client's own epochs are in the log too")
