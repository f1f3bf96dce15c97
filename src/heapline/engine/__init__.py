"""The log broker in one process."""

from __future__ import annotations

from os import PathLike
from typing import Any

from heapline.config import make_broker_config
from heapline.engine.embedded import EmbeddedBroker
from heapline.engine.sync import SyncBroker

__all__ = ["EmbeddedBroker", "SyncBroker", "open", "open_sync"]


def open(path: str | PathLike[str], **config: Any) -> EmbeddedBroker:
    """A broker on a directory, in this process; use it with `async with`. Keywords are fields of BrokerConfig."""
    return EmbeddedBroker(str(path), config=make_broker_config(config))


def open_sync(path: str | PathLike[str], **config: Any) -> SyncBroker:
    """The same for code that does not await; use it with `with`."""
    return SyncBroker(str(path), make_broker_config(config))
