"""`describe` tells a caller what a broker can do, on every interface."""

from __future__ import annotations

import pytest

import heapline
from heapline import BadRequest, Broker, Unsupported
from heapline.contract.admin import ListKeys
from heapline.contract.call import CALLS
from heapline.contract.config import BrokerConfig


async def test_describe_returns_features_settings_and_version(broker: Broker) -> None:
    described = await broker.describe()
    assert described.version == heapline.__version__
    assert set(described.settings) == set(BrokerConfig.__struct_fields__)
    assert described.settings["batch_timeout"] == BrokerConfig().batch_timeout


async def test_call_of_an_undeclared_feature_is_refused(broker: Broker) -> None:
    if "auth" not in (await broker.describe()).features:
        with pytest.raises((Unsupported, BadRequest)):  # a server that has no keys answers itself
            await broker.do(ListKeys())


async def test_describe_lists_the_features_of_all_calls_of_a_broker(broker: Broker) -> None:
    of_calls = {kind.facts.feature for kind in CALLS.values()} - {"auth"}  # keys and users belong to the server
    assert of_calls <= set((await broker.describe()).features)
