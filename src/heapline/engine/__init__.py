"""The log broker in one process.

The broker is imported when one is opened: clients import only the checks from this package.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from heapline.contract.config import make_broker_config

if TYPE_CHECKING:
    from heapline.engine.broker import EmbeddedBroker, SyncBroker

__all__ = ["EmbeddedBroker", "SyncBroker", "open", "open_sync"]


def open(path: str | PathLike[str], **config: Any) -> EmbeddedBroker:
    """Return a broker on a directory, in this process, for `async with`. Keywords are fields of BrokerConfig."""
    from heapline.engine.broker import EmbeddedBroker

    return EmbeddedBroker(str(path), config=make_broker_config(config))


def open_sync(path: str | PathLike[str], **config: Any) -> SyncBroker:
    """Return a blocking broker for code that does not await; use it with `with`."""
    from heapline.engine.broker import SyncBroker

    return SyncBroker(str(path), make_broker_config(config))


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in ("EmbeddedBroker", "SyncBroker"):
            raise AttributeError(f"module 'heapline.engine' has no attribute {name!r}")
        from heapline.engine import broker

        return getattr(broker, name)
