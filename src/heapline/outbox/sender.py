"""Send the claimed rows of one topic, and return the outcome of each. relay.py says why this is exactly once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from heapline.contract.broker import Broker
from heapline.contract.errors import (
    BadRequest,
    Closed,
    HeaplineError,
    IdempotencyConflict,
    PermissionDenied,
    RequestError,
    StaleEpoch,
    StaleSequence,
    TopicNotFound,
    Unauthenticated,
)
from heapline.contract.message import Outgoing
from heapline.logs import Log
from heapline.outbox.store import ERROR_CHARACTERS, Row

log = Log("heapline.outbox")

#: Nothing is wrong with the rows. They wait until an operator creates the topic or grants the rights.
WAITS = (TopicNotFound, PermissionDenied, Unauthenticated, Closed)
IN_DOUBT_BEGINS = "it is unknown whether this was enqueued"
IN_DOUBT = (
    f"{IN_DOUBT_BEGINS}: the broker has seen a newer epoch of this lane than the database, which was restored or "
    "copied; look for it in the topic, then delete the row, or send it again with `heapline outbox retry`"
)


@dataclass(slots=True)
class Group:
    """Rows of one topic and epoch, by number. A lane has at most one group per topic."""

    topic: str
    rows: list[Row]
    tried: bool  # whether some of them may have been enqueued already
    pause: float = 0.0
    retry_at: float = 0.0


@dataclass(slots=True)
class Sent:
    """Outcomes of a group's rows. Rows that are in none of the lists are tried again."""

    sent: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    newer_epoch: int = 0  # of the broker, if rows are returned
    trouble: str | None = None  # why some wait


async def send(broker: Broker, producer_id: str, group: Group) -> Sent:
    """Send a group, in one call if possible. Rows that are done are removed from it."""
    result = Sent()
    rows = group.rows
    if await _try(broker, producer_id, group, rows, result) == "refused" and len(rows) > 1:
        # One by one, in order, up to the first that is rejected for good: that must be in the database before a higher
        # number is sent.
        for row in rows:
            if await _try(broker, producer_id, group, [row], result) != "sent":
                break
    settled = {*result.sent, *result.returned, *(id for id, _ in result.failed)}
    group.rows = [row for row in rows if row.id not in settled]
    return result


async def _try(
    broker: Broker, producer_id: str, group: Group, rows: list[Row], result: Sent
) -> Literal["sent", "refused", "waits"]:
    """Send rows as one atomic batch."""
    try:
        await broker.enqueue_batch(
            group.topic,
            [_outgoing(row) for row in rows],
            producer_id=producer_id,
            epoch=rows[0].epoch,
            answered_below=group.rows[0].seq,
        )
    except StaleEpoch as error:
        left = [row.id for row in group.rows if row.id not in result.sent]
        if group.tried or error.repeated:
            result.failed += [(id, IN_DOUBT) for id in left]
        else:  # rejected before any of it was enqueued: it gets numbers of a new epoch
            result.returned += left
            result.newer_epoch = error.current
        return "waits"
    except WAITS as error:
        result.trouble = _describe(error)
        return "waits"
    except (StaleSequence, IdempotencyConflict, RequestError) as error:
        if len(rows) > 1:
            return "refused"
        if not isinstance(error, StaleSequence):
            result.failed.append((rows[0].id, _describe(error)))
            log.error("broker rejects a row", topic=group.topic, row=rows[0].id, error=type(error).__name__)
            return "refused"
        # It was enqueued so long ago that the broker has forgotten its id, but not its number.
    except (HeaplineError, OSError) as error:
        group.tried = True
        result.trouble = _describe(error)
        return "waits"
    result.sent += [row.id for row in rows]
    return "sent"


def _outgoing(row: Row) -> Outgoing:
    try:
        return row.outgoing()
    except Exception as error:  # not written by `enqueue`; it must not block all others
        raise BadRequest(f"this row is not a message ({type(error).__name__}); use outbox.enqueue") from None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
