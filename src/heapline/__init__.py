"""Heapline: a durable, partitioned priority and time queue.

>>> import heapline
>>> async def main():
...     async with heapline.open("data") as hl:
...         await hl.create_topic("jobs")
...         await hl.enqueue("jobs", b"hello", priority=5)
...         for m in await hl.pop("jobs"):
...             await m.ack()

Each name is imported when it is first used, so `import heapline` costs almost nothing.
"""

TYPE_CHECKING = False  # type checkers take it for True; typing itself would be half of what is loaded here
if TYPE_CHECKING:
    from heapline import outbox as outbox
    from heapline.client.batch_consumer import consume_batches
    from heapline.client.connect import connect, connect_from_env, connect_sync
    from heapline.client.consumer import consume
    from heapline.client.target import ClientTls
    from heapline.client.tasks import App, Bury, Retry
    from heapline.contract.broker import Broker
    from heapline.contract.config import Aging, Backoff, BrokerConfig, GroupConfig, TopicConfig, aging
    from heapline.contract.errors import (
        BadName,
        BadRequest,
        BatchDecided,
        BatchInDoubt,
        Closed,
        ConfirmationNeeded,
        ConflictError,
        CorruptionError,
        DeadlineExceeded,
        DeliveryLost,
        DirectoryLocked,
        GroupExists,
        GroupNotFound,
        HeaplineError,
        IdempotencyConflict,
        JournalCorrupt,
        LeaseLost,
        MemberReplaced,
        MessageLeased,
        MessageNotFound,
        PayloadTooLarge,
        PermissionDenied,
        RateLimited,
        RecordCorrupt,
        ReplayExists,
        ReplayNotFound,
        RequestError,
        ResourceExhausted,
        ScheduleNotFound,
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
        Unsupported,
    )
    from heapline.contract.leased_batch import LeasedBatch
    from heapline.contract.message import (
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
        SinkInfo,
        SpineStats,
        TopicInfo,
        TopicStats,
    )
    from heapline.contract.producer import Producer
    from heapline.contract.schedules import Schedule, ScheduleInfo
    from heapline.contract.stream import (
        GroupDeadLetter,
        GroupInfo,
        GroupOffset,
        ReplayFilter,
        ReplayInfo,
        StreamBatch,
        StreamMessage,
    )
    from heapline.engine import open, open_sync

__version__ = "0.1.0"

__all__ = [
    "Aging", "App", "Backoff", "BadName", "BadRequest", "BatchDecided", "BatchInDoubt", "BatchInfo", "Broker",
    "BrokerConfig", "Bury", "ClientTls", "Closed", "ConfirmationNeeded", "ConflictError", "CorruptionError",
    "DeadlineExceeded", "DeliveryLost", "DepthBucket", "DirectoryLocked", "DlqFilter", "DueBucket", "Enqueued",
    "GroupConfig", "GroupDeadLetter", "GroupExists", "GroupInfo", "GroupNotFound", "GroupOffset", "HeaplineError",
    "IdempotencyConflict", "JournalCorrupt", "LatencyHistogram", "LeaseLost", "LeaseRef", "LeasedBatch", "LogEvent",
    "LogFrame", "MemberReplaced", "Message", "MessageInfo", "MessageLeased", "MessageNotFound", "Outgoing",
    "PartitionStats", "PayloadTooLarge", "PermissionDenied", "Producer", "RateLimited", "RecordCorrupt",
    "ReplayExists", "ReplayFilter", "ReplayInfo", "ReplayNotFound", "RequestError", "ResourceExhausted", "Retry",
    "Schedule", "ScheduleInfo", "ScheduleNotFound", "SinkInfo", "SnapshotCorrupt", "SpineStats", "StaleEpoch",
    "StaleSequence", "StorageFull", "StreamBatch", "StreamMessage", "TopicConfig", "TopicExists", "TopicInfo",
    "TopicNotFound", "TopicReloading", "TopicStats", "Unauthenticated", "UnavailableError", "UnknownFormat",
    "UnknownPart", "Unsupported", "aging",
    "connect", "connect_from_env", "connect_sync", "consume", "consume_batches", "open", "open_sync",
]  # fmt: skip

#: The module that defines each public name.
_HOMES = {
    "heapline.contract.broker": ("Broker",),
    "heapline.client.connect": ("connect", "connect_from_env", "connect_sync"),
    "heapline.client.batch_consumer": ("consume_batches",),
    "heapline.client.consumer": ("consume",),
    "heapline.client.target": ("ClientTls",),
    "heapline.client.tasks": ("App", "Bury", "Retry"),
    "heapline.contract.config": ("Aging", "Backoff", "BrokerConfig", "GroupConfig", "TopicConfig", "aging"),
    "heapline.engine": ("open", "open_sync"),
    "heapline.contract.errors": (
        "BadName", "BadRequest", "BatchDecided", "BatchInDoubt", "Closed", "ConfirmationNeeded", "ConflictError",
        "CorruptionError", "DeadlineExceeded", "DeliveryLost", "DirectoryLocked", "GroupExists", "GroupNotFound",
        "HeaplineError", "IdempotencyConflict", "JournalCorrupt", "LeaseLost", "MemberReplaced", "MessageLeased",
        "MessageNotFound", "PayloadTooLarge", "PermissionDenied", "RateLimited", "RecordCorrupt", "ReplayExists",
        "ReplayNotFound", "RequestError", "ResourceExhausted", "ScheduleNotFound", "SnapshotCorrupt", "StaleEpoch",
        "StaleSequence", "StorageFull", "TopicExists", "TopicNotFound", "TopicReloading", "Unauthenticated",
        "UnavailableError", "UnknownFormat", "UnknownPart", "Unsupported",
    ),
    "heapline.contract.leased_batch": ("LeasedBatch",),
    "heapline.contract.message": (
        "BatchInfo", "DepthBucket", "DlqFilter", "DueBucket", "Enqueued", "LatencyHistogram", "LeaseRef", "LogEvent",
        "LogFrame", "Message", "MessageInfo", "Outgoing", "PartitionStats", "SinkInfo", "SpineStats", "TopicInfo",
        "TopicStats",
    ),
    "heapline.contract.producer": ("Producer",),
    "heapline.contract.schedules": ("Schedule", "ScheduleInfo"),
    "heapline.contract.stream": (
        "GroupDeadLetter", "GroupInfo", "GroupOffset", "ReplayFilter", "ReplayInfo", "StreamBatch", "StreamMessage",
    ),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_PACKAGES = ("contract", "engine", "outbox")  # reachable after `import heapline` alone

if not TYPE_CHECKING:  # a type checker would otherwise accept every name, misspelled ones too

    def __getattr__(name: str) -> object:
        import importlib

        if name in _PACKAGES:
            return importlib.import_module(f"heapline.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module 'heapline' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_PACKAGES} - {"TYPE_CHECKING"})
