"""Settle the acks and nacks of a turn. Those of one member and partition become one event, however many calls there
were.

Rows that the member no longer holds are reported to the calls that named them; all other rows are settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from heapline.contract.errors import ConflictError, DeliveryLost, HeaplineError, RequestError
from heapline.core.groups.group import Group
from heapline.core.now import Now
from heapline.engine.committer import give, refuse
from heapline.engine.groups.fetch import SettleCall

if TYPE_CHECKING:
    from heapline.engine.groups.service import StreamServing
    from heapline.engine.runner import TopicRunner

I64 = npt.NDArray[np.int64]
ACK_ROWS, NACK_ROWS = 32768, 16384  # per event, which must fit into the smallest segment: 24 and 56 bytes each
_Key = tuple[str, str, int, bool, str]  # group, member, partition, nacks, reason


def settle_all(serving: StreamServing, runner: TopicRunner, calls: Sequence[SettleCall], now: Now) -> None:
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


def _settle(serving: StreamServing, group: Group, key: _Key, offsets: I64, now: Now) -> I64:
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
