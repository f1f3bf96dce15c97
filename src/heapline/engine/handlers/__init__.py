"""The engine's handlers: one function per command, in the table that `EmbeddedBroker.do` looks up.

A handler receives the broker, the command, whose fields are valid, and the context. It checks what depends on a topic's
settings, calls the topic's runner, and returns an awaitable of the command's result.
"""

from heapline.engine.handlers import batches, dead_letters, groups, leases, log, messages, replays, schedules, topics
from heapline.engine.handlers.table import FEEDS, HANDLERS

__all__ = [
    "FEEDS",
    "HANDLERS",
    "batches",
    "dead_letters",
    "groups",
    "leases",
    "log",
    "messages",
    "replays",
    "schedules",
    "topics",
]
