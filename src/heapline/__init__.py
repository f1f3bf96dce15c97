"""Heapline: a durable, partitioned priority and time queue.

>>> import heapline
>>> async def main():
...     async with heapline.open("data") as hl:
...         await hl.create_topic("jobs")
...         await hl.enqueue("jobs", b"hello", priority=5)
...         for m in await hl.pop("jobs"):
...             await m.ack()
"""

import typing as _typing

from heapline.broker import Broker
from heapline.config import Aging, Backoff, BrokerConfig, TopicConfig, aging
from heapline.engine import open, open_sync
from heapline.errors import (
    BadName,
    BadRequest,
    BatchDecided,
    BatchInDoubt,
    Closed,
    ConfirmationNeeded,
    ConflictError,
    CorruptionError,
    DeadlineExceeded,
    DirectoryLocked,
    HeaplineError,
    IdempotencyConflict,
    JournalCorrupt,
    LeaseLost,
    MessageLeased,
    MessageNotFound,
    PayloadTooLarge,
    PermissionDenied,
    RateLimited,
    RecordCorrupt,
    RequestError,
    ResourceExhausted,
    SnapshotCorrupt,
    StaleEpoch,
    StaleSequence,
    StorageFull,
    TopicExists,
    TopicNotFound,
    TopicReloading,
    Unauthenticated,
    UnavailableError,
    UnknownFormat,
    UnknownPart,
)  # fmt: skip
from heapline.model import (
    BatchInfo,
    DepthBucket,
    DlqFilter,
    DueBucket,
    Enqueued,
    LatencyHistogram,
    LeaseRef,
    LogEvent,
    LogFrame,
    Message,
    MessageInfo,
    Outgoing,
    PartitionStats,
    SpineStats,
    TopicInfo,
    TopicStats,
)  # fmt: skip
from heapline.producer import Producer

if _typing.TYPE_CHECKING:
    from heapline import outbox as outbox
    from heapline.client.connecting import connect, connect_from_env, connect_sync
    from heapline.client.consuming import consume
    from heapline.client.target import ClientTls
    from heapline.client.tasks import App, Bury, Retry

__version__ = "0.1.0"

__all__ = [
    "Aging", "App", "Backoff", "BadName", "BadRequest", "BatchDecided", "BatchInDoubt", "BatchInfo", "Broker",
    "BrokerConfig", "Bury", "ClientTls", "Closed", "ConfirmationNeeded", "ConflictError", "CorruptionError",
    "DeadlineExceeded", "DepthBucket", "DirectoryLocked", "DlqFilter", "DueBucket", "Enqueued", "HeaplineError",
    "IdempotencyConflict", "JournalCorrupt", "LatencyHistogram", "LeaseLost", "LeaseRef", "LogEvent", "LogFrame",
    "Message", "MessageInfo", "MessageLeased", "MessageNotFound", "Outgoing", "PartitionStats", "PayloadTooLarge",
    "PermissionDenied", "Producer", "RateLimited", "RecordCorrupt", "RequestError", "ResourceExhausted", "Retry",
    "SnapshotCorrupt", "SpineStats", "StaleEpoch", "StaleSequence", "StorageFull", "TopicConfig", "TopicExists",
    "TopicInfo", "TopicNotFound", "TopicReloading", "TopicStats", "Unauthenticated", "UnavailableError",
    "UnknownFormat", "UnknownPart", "aging",
    "connect", "connect_from_env", "connect_sync", "consume", "open", "open_sync",
]  # fmt: skip

#: Where names are that `import heapline` does not load: whoever asks for one gets it.
_ELSEWHERE = {
    "App": "heapline.client.tasks",
    "Bury": "heapline.client.tasks",
    "ClientTls": "heapline.client.target",
    "connect": "heapline.client.connecting",
    "connect_from_env": "heapline.client.connecting",
    "connect_sync": "heapline.client.connecting",
    "consume": "heapline.client.consuming",
    "Retry": "heapline.client.tasks",
}


def __getattr__(name: str) -> _typing.Any:
    import importlib

    if name == "outbox":
        return importlib.import_module("heapline.outbox")
    module = _ELSEWHERE.get(name)
    if module is None:
        raise AttributeError(f"module 'heapline' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _ELSEWHERE.keys())
