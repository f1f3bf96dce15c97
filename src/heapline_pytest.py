"""The pytest plugin of Heapline: `heapline_broker`, `heapline_sync_broker`, `heapline_clock`.

It is outside the package because every pytest run loads every installed plugin: a run that does not use these fixtures
does not import Heapline. `heapline.testing` explains how to use them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from heapline.testing import HandClock, MemoryBroker, SyncMemoryBroker


@pytest.fixture
def heapline_clock() -> HandClock:
    """The clock of this test's brokers. It moves only when you call `heapline_clock.advance(60)`."""
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
