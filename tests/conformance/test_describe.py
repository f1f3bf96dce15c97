"""`describe` tells a caller what a broker can do, on every interface."""

from __future__ import annotations

from contextlib import suppress

import pytest

import heapline
from heapline import BadRequest, Broker, Unsupported
from heapline.contract.admin import ListKeys
from heapline.contract.batches import ListBatches
from heapline.contract.call import CALLS
from heapline.contract.config import BrokerConfig
from heapline.contract.dead_letters import GroupDeadLetters
from heapline.contract.errors import MessageNotFound
from heapline.contract.groups import ListGroups
from heapline.contract.inspection import Explain, GetDueTimes, ListLeases, MessageHistory, SearchMessages, StatsSeries
from heapline.contract.log import GetOffsets
from heapline.contract.messages import ScanMessages
from heapline.contract.replays import ListReplays
from heapline.contract.schedules import ListSchedules
from heapline.contract.topics import CountPurge, SetPartitionThrottled, Snapshot
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World


async def test_describe_returns_features_settings_and_version(world: World, broker: Broker) -> None:
    described = await broker.describe()
    assert described.version == heapline.__version__
    assert described.settings
    assert set(described.features) == world.features
    if described.broker == "log":
        assert set(described.settings) == set(BrokerConfig.__struct_fields__)
        assert described.settings["batch_timeout"] == BrokerConfig().batch_timeout


async def test_call_of_an_undeclared_feature_is_refused(broker: Broker) -> None:
    if "auth" not in (await broker.describe()).features:
        with pytest.raises((Unsupported, BadRequest)):  # a server without keys answers by itself
            await broker.do(ListKeys())


#: A call of every feature that a broker may lack.
CALLS_BY_FEATURE = {
    "partitions": SetPartitionThrottled("jobs", 0, True),
    "events": GetOffsets("jobs"),
    "log": Snapshot("jobs"),
    "scan": ScanMessages("jobs"),
    "groups": ListGroups("jobs"),
    "replay": ListReplays(),
    "schedules": ListSchedules(),
    "batches": ListBatches(),
    "explain": Explain("jobs"),
    "leases": ListLeases("jobs"),
    "series": StatsSeries("jobs"),
    "history": MessageHistory("jobs", 1),
    "search": SearchMessages("jobs", "x"),
    "due_times": GetDueTimes("jobs"),
    "dlq_groups": GroupDeadLetters("jobs"),
    "purge_count": CountPurge("jobs"),
}


def test_every_feature_with_calls_has_an_example() -> None:
    of_calls = {kind.facts.feature for kind in CALLS.values()} - {"auth", "queue"}  # a server has auth, all have queue
    assert {type(command).facts.feature for command in CALLS_BY_FEATURE.values()} == set(CALLS_BY_FEATURE) == of_calls


@pytest.mark.parametrize("feature", sorted(CALLS_BY_FEATURE))
async def test_broker_refuses_exactly_the_features_that_it_does_not_declare(jobs: Broker, feature: str) -> None:
    if feature in (await jobs.describe()).features:
        with suppress(
            MessageNotFound, BadRequest
        ):  # there is no message 1; a topic may have to be set to record events
            await jobs.do(CALLS_BY_FEATURE[feature])
    else:
        with pytest.raises(Unsupported) as caught:
            await jobs.do(CALLS_BY_FEATURE[feature])
        assert caught.value.feature == feature


#: A setting of every feature, other than its default.
SETTINGS_BY_FEATURE: dict[str, dict[str, object]] = {
    "partitions": {"strategy": "round_robin"}, "fairness": {"fairness": "keys"}, "log": {"retention_bytes": 1 << 20},
    "events": {"retention": 60.0},
}  # fmt: skip


@pytest.mark.parametrize("feature", sorted(SETTINGS_BY_FEATURE))
async def test_setting_of_an_undeclared_feature_is_refused(world: World, topic: MakeTopic, feature: str) -> None:
    if feature in world.features:
        await topic("other", **SETTINGS_BY_FEATURE[feature])
    else:
        with pytest.raises(Unsupported):
            await topic("other", **SETTINGS_BY_FEATURE[feature])
        assert await world.broker.list_topics() == []
