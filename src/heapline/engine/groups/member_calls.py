"""Fetch and settle calls of group members, and how acks and nacks of a turn are settled together.

Acks and nacks of one member and partition become one event, however many calls there were. Rows that the member no
longer holds are reported to the calls that named them; all other rows are settled.

Rows taken for a member become batches. Most rows come from a page that all groups share. A row that is redelivered
after a failure may be stored anywhere, so its record is read separately. A batch holds rows of one partition;
redelivered rows of a share come first.
"""

from __future__ import annotations

from asyncio import Future, TimerHandle
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from heapline.contract.errors import ConflictError, DeliveryLost, HeaplineError, RequestError
from heapline.contract.stream import StreamBatch
from heapline.core.events import AnyEvent
from heapline.core.groups.deliveries import Columns
from heapline.core.groups.group import Group, Share
from heapline.core.now import Now
from heapline.engine.committer import give, refuse
from heapline.engine.groups.members import Sessions
from heapline.engine.groups.pages import Page
from heapline.engine.loaded_topic import RunningTopic

I64 = npt.NDArray[np.int64]
ACK_ROWS, NACK_ROWS = 32768, 16384  # per event, which must fit into the smallest segment: 24 and 56 bytes each
_Key = tuple[str, str, int, bool, str]  # group, member, partition, nacks, reason


class FetchCall(msgspec.Struct, eq=False):
    """One fetch request and its state."""

    future: Future[Any]
    group: str
    member: str
    session: str
    max_messages: int
    max_bytes: int
    waits: bool
    timer: TimerHandle | None = None
    reading: bool = False  # waits for a page that is being read


class SettleCall(msgspec.Struct, eq=False):
    """Rows to ack or nack."""

    future: Future[Any]
    group: str
    member: str
    session: str
    offsets: Mapping[int, I64]
    nacks: bool
    reason: str


class GroupServing(Protocol):
    """The groups of a topic as their calls see them. `StreamServing` implements and documents it."""

    sessions: Sessions
    inbox: list[FetchCall | SettleCall]
    at_disk: set[FetchCall]
    moved_on: int

    def group(self, name: str) -> Group: ...
    def emit(self, group: Group, partition: int, event: AnyEvent, now: Now) -> None: ...
    def acked(self, group: Group, now: Now) -> None: ...
    def rests_on(self, name: str) -> int: ...
    def draw(self, count: int) -> npt.NDArray[np.float64]: ...


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


def settle_all(serving: GroupServing, runner: RunningTopic, calls: Sequence[SettleCall], now: Now) -> None:
    errors: dict[int, HeaplineError] = {}
    together: dict[_Key, list[tuple[int, I64]]] = {}
    groups: dict[str, Group] = {}
    for number, call in enumerate(calls):
        try:
            group = groups[call.group] = serving.group(call.group)
            serving.sessions.check(call.group, call.member, call.session, call.member in group.members.leases)
        except (RequestError, ConflictError) as error:
            errors[number] = error
            continue
        group.beat(call.member, now.steady)
        for partition, offsets in call.offsets.items():
            key = (call.group, call.member, partition, call.nacks, call.reason)
            together.setdefault(key, []).append((number, offsets))
    lost: dict[int, list[tuple[int, I64]]] = {}
    for key, parts in together.items():
        columns = [offsets for _, offsets in parts]
        gone = _settle(serving, groups[key[0]], key, columns[0] if len(columns) == 1 else np.concatenate(columns), now)
        if len(gone):
            for number, offsets in parts:
                mine = offsets[np.isin(offsets, gone)]
                if len(mine):
                    lost.setdefault(number, []).append((key[2], mine))
    for group in groups.values():
        serving.acked(group, now)
    for number, some in lost.items():
        partitions = [partition for partition, offsets in some for _ in range(len(offsets))]
        offsets = np.concatenate([offsets for _, offsets in some]).tolist()
        errors[number] = DeliveryLost(partitions, offsets, runner.name, calls[number].group)
    runner.loaded.committer.answer(partial(_answer, calls, errors), [call.future for call in calls])


def _settle(serving: GroupServing, group: Group, key: _Key, offsets: I64, now: Now) -> I64:
    """Emit one event, or several for many rows. Return the offsets that the member no longer holds."""
    _, member, partition, nacks, reason = key
    gone: list[I64] = []
    if not (offsets[1:] > offsets[:-1]).all():
        offsets = np.sort(offsets)
        offsets = offsets[np.append(True, offsets[1:] > offsets[:-1])]
    limit = NACK_ROWS if nacks else ACK_ROWS
    for start in range(0, len(offsets), limit):
        some = offsets[start : start + limit]
        if nacks:
            events, missing = group.decide_nack(member, partition, some, serving.draw(len(some)), reason, now.steady)
            for event in events:
                serving.emit(group, partition, event, now)
        else:
            acked, missing = group.decide_ack(member, partition, some, now.steady)
            if acked is not None:
                serving.emit(group, partition, acked, now)
        gone.append(missing)
    return np.concatenate(gone) if gone else offsets


def _answer(calls: Sequence[SettleCall], errors: dict[int, HeaplineError]) -> None:
    for number, call in enumerate(calls):
        if number in errors:
            refuse(call.future, errors[number])
        else:
            give(call.future, None)
