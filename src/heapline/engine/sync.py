"""The embedded broker for code that does not await."""

from __future__ import annotations

from heapline.contract.broker import Broker
from heapline.contract.config import BrokerConfig
from heapline.contract.sync_broker import SyncBroker as _SyncBroker
from heapline.contract.sync_broker import SyncMessage
from heapline.engine.broker import EmbeddedBroker

__all__ = ["SyncBroker", "SyncMessage"]


class SyncBroker(_SyncBroker):
    """The broker returned by `heapline.open_sync`; use it with `with`. Safe to call from several threads."""

    def __init__(self, path: str, config: BrokerConfig) -> None:
        async def open() -> Broker:
            return await EmbeddedBroker(path, config=config).__aenter__()

        super().__init__(open)
