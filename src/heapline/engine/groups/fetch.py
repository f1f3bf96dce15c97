"""Fetch and settle calls, and the conversion of rows taken for a member into batches.

Most rows come from a page that all groups share. A row that is redelivered after a failure may be stored anywhere, so
its record is read separately. A batch holds rows of one partition; redelivered rows of a share come first.
"""

from __future__ import annotations

from asyncio import Future, TimerHandle
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.contract.stream import StreamBatch
from heapline.core.groups.deliveries import Columns
from heapline.core.groups.group import Share
from heapline.engine.groups.pages import Page

I64 = npt.NDArray[np.int64]


class FetchCall:
    """One fetch request and its state."""

    __slots__ = (
        "future", "group", "max_bytes", "max_messages", "member", "reading", "session", "timer", "waits",
    )  # fmt: skip

    def __init__(
        self, future: Future[Any], group: str, member: str, session: str, max_messages: int, max_bytes: int, waits: bool
    ) -> None:
        self.future = future
        self.group, self.member, self.session = group, member, session
        self.max_messages, self.max_bytes = max_messages, max_bytes
        self.waits = waits
        self.timer: TimerHandle | None = None
        self.reading = False  # waits for a page that is being read


class SettleCall:
    """Rows to ack or nack."""

    __slots__ = ("future", "group", "member", "nacks", "offsets", "reason", "session")

    def __init__(
        self, future: Future[Any], group: str, member: str, session: str, offsets: Mapping[int, I64], nacks: bool,
        reason: str,
    ) -> None:  # fmt: skip
        self.future = future
        self.group, self.member, self.session = group, member, session
        self.offsets, self.nacks, self.reason = offsets, nacks, reason


class Loose:
    """Rows whose records must be read separately."""

    __slots__ = ("attempts", "partition", "rows")

    def __init__(self, partition: int, rows: Columns, attempts: I64) -> None:
        order = np.argsort(rows.offsets, kind="stable")
        self.partition, self.rows, self.attempts = partition, rows.only(order), attempts[order]


def split_share(
    share: Share, page: Page | None, topic: str, id_suffix: int
) -> tuple[Loose | None, StreamBatch | None, I64]:
    """Return the rows outside the page, those in it as a batch, and the offsets of rows that cannot be read."""
    offsets = share.rows.offsets
    none: I64 = offsets[:0]
    if page is None or not len(page):
        return Loose(share.partition, share.rows, share.attempts), None, none
    own = page.rows.offsets
    first, count = int(np.searchsorted(own, offsets[0])), len(offsets)
    if np.array_equal(own[first : first + count], offsets):  # the usual case: the next rows of the page
        return None, *_batch(page, slice(first, first + count), share.attempts, topic, id_suffix)
    at = np.minimum(np.searchsorted(own, offsets), len(own) - 1)
    inside = own[at] == offsets
    loose = None
    if not inside.all():
        loose = Loose(share.partition, share.rows.only(~inside), share.attempts[~inside])
    if not inside.any():
        return loose, None, none
    return loose, *_batch(page, at[inside], share.attempts[inside], topic, id_suffix)


def _batch(page: Page, at: I64 | slice, attempts: I64, topic: str, id_suffix: int) -> tuple[StreamBatch | None, I64]:
    bad = page.rows.offsets[:0]
    if page.bad:
        where = np.arange(len(page))[at]
        good = ~np.isin(where, np.fromiter(page.bad, np.int64, len(page.bad)))
        if not good.all():
            bad = page.rows.offsets[where[~good]]
            at, attempts = where[good], attempts[good]
            if not len(attempts):
                return None, bad
    return page.batch(None, topic, id_suffix, at, attempts), bad


def only(batch: StreamBatch, which: npt.NDArray[np.bool_]) -> StreamBatch:
    """Return the selected rows of a batch."""
    at = np.flatnonzero(which)

    def pick(column: Any) -> Any:
        return None if column is None else [column[i] for i in at.tolist()]

    return StreamBatch(
        batch._settles, batch.topic, batch.partition, batch.offsets[at], batch.ids[at], pick(batch.payloads),
        batch.priorities[at], batch.attempts[at], batch.enqueued_ms[at], pick(batch.keys), pick(batch.headers),
        pick(batch.fairness_keys), id_suffix=batch.id_suffix,
    )  # fmt: skip
