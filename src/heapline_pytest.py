"""The pytest plugin of Heapline: `heapline_broker`, `heapline_sync_broker`, `heapline_clock`.

It stands outside of the package, so that a pytest run that uses none of them does not import Heapline: every run in an
environment loads every installed plugin. What to do with the fixtures is told in `heapline.testing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from heapline.testing import HandClock, MemoryBroker, SyncMemoryBroker


@pytest.fixture
def heapline_clock() -> HandClock:
    """The time of the brokers of this test: it stands still until it is moved, `heapline_clock.advance(60)`."""
    from heapline.testing import HandClock

    return HandClock()


@pytest.fixture
def heapline_broker(heapline_clock: HandClock) -> Iterator[MemoryBroker]:
    """A broker in memory, for tests with an event loop: it opens by itself in the loop that uses it first."""
    from heapline.testing import MemoryBroker

    broker = MemoryBroker(heapline_clock)
    yield broker
    broker.abandon()


@pytest.fixture
def heapline_sync_broker(heapline_clock: HandClock) -> Iterator[SyncMemoryBroker]:
    """A broker in memory, for tests that do not await."""
    from heapline.testing import SyncMemoryBroker

    with SyncMemoryBroker(heapline_clock) as broker:
        yield broker
