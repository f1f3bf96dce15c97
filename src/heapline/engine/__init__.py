"""The log broker in one process.

Loaded when one is opened: clients take only their checks from this room.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from heapline.config import make_broker_config

if TYPE_CHECKING:
    from heapline.engine.embedded import EmbeddedBroker
    from heapline.engine.sync import SyncBroker

__all__ = ["EmbeddedBroker", "SyncBroker", "open", "open_sync"]


def open(path: str | PathLike[str], **config: Any) -> EmbeddedBroker:
    """A broker on a directory, in this process; use it with `async with`. Keywords are fields of BrokerConfig."""
    from heapline.engine.embedded import EmbeddedBroker

    return EmbeddedBroker(str(path), config=make_broker_config(config))


def open_sync(path: str | PathLike[str], **config: Any) -> SyncBroker:
    """The same for code that does not await; use it with `with`."""
    from heapline.engine.sync import SyncBroker

    return SyncBroker(str(path), make_broker_config(config))


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in ("EmbeddedBroker", "SyncBroker"):
            raise AttributeError(f"module 'heapline.engine' has no attribute {name!r}")
        from heapline.engine import embedded, sync

        return embedded.EmbeddedBroker if name == "EmbeddedBroker" else sync.SyncBroker
