"""Replay requests: validated once, and normalized so that two requests can be compared, stored and sent.

The rows that a request selects are determined in ranges.py, which reads the journal.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from heapline.contract.check import instant_to_ms
from heapline.contract.groups import Position
from heapline.contract.replays import Replay, StartReplay
from heapline.contract.stream import ReplayFilter


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A requested position in the log: exactly one field is set."""

    end_of_log: Literal["earliest", "latest"] | None = None
    offset: int | None = None
    offsets: dict[int, int] | None = None  # by partition
    wall_ms: int | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The requested rows of a topic. If `end` is None, the replay ends at what is durable when it starts."""

    topic: str
    start: Mark = Mark(end_of_log="earliest")
    end: Mark | None = None
    partitions: list[int] | None = None
    mode: Literal["all", "fast"] = "all"
    where: ReplayFilter | None = None
    rate: float | None = None


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields to replace in a message on its way into a topic. It keeps the others, but is due immediately."""

    priority: int | None = None
    delay: float | None = None
    deliver_at_ms: int | None = None
    keep_due: bool = False


def request_of(command: Replay | StartReplay) -> Request:
    """Return a command's request in the form that is compared and stored."""
    where = None if command.where == ReplayFilter() else command.where
    return Request(
        topic=command.topic,
        start=_mark(command.start),
        end=None if command.end is None else _mark(command.end),
        partitions=None if command.partitions is None else sorted(set(command.partitions)),
        mode=command.mode,
        where=where,
        rate=command.rate,
    )


def _mark(position: Position) -> Mark:
    return Mark(
        end_of_log=position.edge,
        offset=position.offset,
        offsets=position.offsets,
        wall_ms=None if position.at is None else instant_to_ms(position.at),
    )
