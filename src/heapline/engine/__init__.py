"""The log broker in one process."""

from __future__ import annotations

from typing import Any

from heapline.config import BrokerConfig
from heapline.engine.embedded import EmbeddedBroker
from heapline.engine.sync import SyncBroker

__all__ = ["EmbeddedBroker", "SyncBroker", "open", "open_sync"]


def open(path: str, **config: Any) -> EmbeddedBroker:
    """A broker on a directory, in this process; use it with `async with`. Keywords are fields of BrokerConfig."""
    return EmbeddedBroker(str(path), config=BrokerConfig(**config))


def open_sync(path: str, **config: Any) -> SyncBroker:
    """The same for code that does not await; use it with `with`."""
    return SyncBroker(str(path), BrokerConfig(**config))
