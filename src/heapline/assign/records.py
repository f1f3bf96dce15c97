"""What stands under which key: a worker's own record, and the leader's.

`worker.<id>` is written by its session alone, by compare-and-set on its own last revision; a leader may write over it
to say that the session has ended. `leader` says who leads. `assignment` is in document.py. Nothing here decides.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import msgspec

ASSIGNMENT_KEY = "assignment"
LEADER_KEY = "leader"
WORKER_PREFIX = "worker."


class Standing(StrEnum):
    LIVE = "live"
    RELEASED = "released"  # stopped: it dropped everything first, and will hold nothing any more
    ENDED = "ended"  # a leader's tombstone, written over the last renewal when its lease was over
    BARRED = "barred"  # a leader's, where the key was gone: whoever was there can no longer renew


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of `worker.<id>`. `confirmed` never falls within a session, so an old reading of it only delays."""

    session: str = ""
    standing: Standing = Standing.LIVE
    confirmed: int = 0  # "I hold nothing that this version of the assignment does not grant me"
    beats: int = 0  # renewals so far
    held: int = 0  # how many partitions it holds, for whoever watches
    refreshes: int = 0  # how often this session asked for the partitions to be listed anew
    ttl: float = 0.0  # how long its holder counts on a renewal, in seconds; 0 = not said
    follows: str = ""  # the session that stood here before and had surely ended when this one began


class LeaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    session: str
    epoch: int  # rises with every taking of the lead
    beats: int = 0
    released: bool = False


def worker_key(worker: str) -> str:
    return WORKER_PREFIX + worker


def encode(record: WorkerRecord | LeaderRecord) -> bytes:
    return msgspec.json.encode(record)


R = TypeVar("R", WorkerRecord, LeaderRecord)


def decode(value: bytes, kind: type[R]) -> R | None:
    """None if it is not such a record: somebody else writes into our keys, and nobody must fall over that."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
