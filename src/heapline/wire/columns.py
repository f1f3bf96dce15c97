"""Batches as columns on the wire: packed numbers, payloads as one blob. A column nobody uses is empty.

Whatever a peer sends is checked here for its form (lengths that fit together, text that is text); what the values may
be is the broker's to say. Items, for clients written by hand, are turned into the same things.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import accumulate, pairwise, repeat, starmap
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.errors import BadRequest
from heapline.model import EPOCH, Message, Outgoing, Popped
from heapline.wire.schema import pb

I64 = npt.NDArray[np.int64]
NO_MOMENT = -(1 << 63)
SCOPES: tuple[Any, ...] = (None, "window", "pending", "until_ack")
_MICROSECOND = timedelta(microseconds=1)
_Texts = list[str | None] | None


def to_us(moment: datetime) -> int:
    return (moment - EPOCH) // _MICROSECOND


def from_us(us: int) -> datetime:
    try:
        return EPOCH + timedelta(microseconds=us)
    except OverflowError:
        raise BadRequest(f"{us} microseconds since 1970 is no moment") from None


def ints(values: Any) -> bytes:
    return np.asarray(values, dtype="<i8").tobytes()


def read_ints(data: bytes, name: str = "a column") -> I64:
    numbers: I64 = unpack(data, "<i8", name).astype(np.int64, copy=False)
    return numbers


def unpack(data: bytes, dtype: str, name: str, count: int | None = None) -> Any:
    """The numbers of a column; `count` of them, if that is known."""
    size = np.dtype(dtype).itemsize
    if len(data) % size or (count is not None and len(data) != count * size):
        wanted = "whole numbers" if count is None else f"{count} numbers"
        raise BadRequest(f"{name} has {len(data)} bytes: it must hold {wanted} of {size} bytes, little-endian")
    return np.frombuffer(data, dtype=dtype)


def cut(payloads: bytes, sizes: bytes, count: int) -> list[bytes]:
    """The payloads of a blob, one object each: all that is made per message."""
    lengths = unpack(sizes, "<u4", "payload_sizes", count)
    ends = list(accumulate(lengths.tolist(), initial=0))
    if ends[-1] != len(payloads):
        raise BadRequest(f"payload_sizes add up to {ends[-1]}, but payloads has {len(payloads)} bytes")
    return [payloads[a:b] for a, b in pairwise(ends)]


def read_sizes(columns: Any) -> npt.NDArray[np.uint32]:
    sizes: npt.NDArray[np.uint32] = unpack(columns.payload_sizes, "<u4", "payload_sizes", columns.count)
    return sizes


def sizes_of(payloads: Sequence[bytes]) -> bytes:
    return np.fromiter(map(len, payloads), dtype="<u4", count=len(payloads)).tobytes()


# -- in ----------------------------------------------------------------------------------------------------------------


def pack_plain(payloads: list[bytes], priorities: Any) -> Any:
    """Messages with nothing but payload and priority."""
    return pb.OutgoingColumns(
        count=len(payloads), priorities=ints(priorities), payload_sizes=sizes_of(payloads), payloads=b"".join(payloads)
    )


def pack_outgoing(messages: Sequence[Outgoing]) -> Any:
    columns = pack_plain([m.payload for m in messages], [m.priority for m in messages])
    for name, field in (("keys", "key"), ("fairness_keys", "fairness_key"), ("idempotency_keys", "idempotency_key")):
        values = [getattr(m, field) for m in messages]
        if any(values):
            getattr(columns, name).extend([v or "" for v in values])
    for name, field in (("delays", "delay"), ("ttls", "ttl")):
        seconds = [getattr(m, field) for m in messages]
        if any(s is not None for s in seconds):
            setattr(columns, name, np.array([math.nan if s is None else s for s in seconds], "<f8").tobytes())
    if any(m.deliver_at is not None for m in messages):
        columns.deliver_at_us = ints([NO_MOMENT if m.deliver_at is None else to_us(m.deliver_at) for m in messages])
    if any(m.max_retries is not None for m in messages):
        retries = [-1 if m.max_retries is None else m.max_retries for m in messages]
        columns.max_retries = np.array(retries, "<i4").tobytes()
    if any(m.seq is not None for m in messages):
        columns.seqs = ints([-1 if m.seq is None else m.seq for m in messages])
    if any(m.idempotency_scope is not None for m in messages):
        columns.idempotency_scopes = bytes([SCOPES.index(m.idempotency_scope) for m in messages])
    if any(m.headers for m in messages):
        columns.headers.extend(pack_headers([m.headers for m in messages]))
    return columns


def is_plain(columns: Any, numbered: bool = False) -> bool:
    """Whether there is nothing but payloads and priorities, or, `numbered`, nothing but these and numbers."""
    return bool(columns.seqs) is numbered and not (
        columns.keys or columns.fairness_keys or columns.idempotency_keys or columns.idempotency_scopes
        or columns.delays or columns.deliver_at_us or columns.ttls or columns.max_retries or columns.headers
    )  # fmt: skip


def is_timed(columns: Any) -> bool:
    """Whether there is nothing but payloads, priorities and perhaps moments."""
    return not (
        columns.keys or columns.fairness_keys or columns.idempotency_keys or columns.idempotency_scopes or columns.seqs
        or columns.delays or columns.ttls or columns.max_retries or columns.headers
    )  # fmt: skip


def unpack_times(columns: Any) -> I64 | None:
    """The moments in ms, as engine/columns.py rounds them, 0 for none; None if there are none at all."""
    if not columns.deliver_at_us:
        return None
    us: I64 = unpack(columns.deliver_at_us, "<i8", "deliver_at_us", columns.count).astype(np.int64)
    return np.where(us == NO_MOMENT, 0, -(-us // 1000))


def unpack_seqs(columns: Any) -> list[int]:
    """The numbers of all messages; none if one lacks its own."""
    seqs = unpack(columns.seqs, "<i8", "seqs", columns.count)
    return seqs.tolist() if len(seqs) and seqs.min() >= 0 else []


def unpack_plain(columns: Any) -> tuple[list[bytes], I64]:
    """Payloads and priorities; the only thing made per message is its payload."""
    count = columns.count
    payloads = cut(columns.payloads, columns.payload_sizes, count)
    if not columns.priorities:
        return payloads, np.zeros(count, dtype=np.int64)
    return payloads, unpack(columns.priorities, "<i8", "priorities", count).astype(np.int64)


def unpack_outgoing(columns: Any) -> list[Outgoing]:
    count = columns.count
    payloads, priorities = unpack_plain(columns)
    scopes: Any = repeat(None)
    if columns.idempotency_scopes:
        codes = unpack(columns.idempotency_scopes, "u1", "idempotency_scopes", count).tolist()
        if max(codes) >= len(SCOPES):
            raise BadRequest(f"idempotency_scopes are 0 to {len(SCOPES) - 1}, not {max(codes)}")
        scopes = [SCOPES[code] for code in codes]
    moments = _numbers(columns.deliver_at_us, "<i8", "deliver_at_us", count, NO_MOMENT)
    rows = zip(
        payloads,
        priorities.tolist(),
        texts_in(columns.keys, "keys", count) or repeat(None),
        _numbers(columns.delays, "<f8", "delays", count, math.nan),
        moments if isinstance(moments, repeat) else [None if us is None else from_us(us) for us in moments],
        headers_in(columns.headers, count) or repeat(None),
        _numbers(columns.ttls, "<f8", "ttls", count, math.nan),
        _numbers(columns.max_retries, "<i4", "max_retries", count, -1),
        texts_in(columns.idempotency_keys, "idempotency_keys", count) or repeat(None),
        scopes,
        _numbers(columns.seqs, "<i8", "seqs", count, -1),
        texts_in(columns.fairness_keys, "fairness_keys", count) or repeat(None),
        strict=False,
    )
    return list(starmap(Outgoing, rows))


def _numbers(data: bytes, dtype: str, name: str, count: int, none: float) -> Any:
    if not data:
        return repeat(None)
    values = unpack(data, dtype, name, count).tolist()
    if math.isnan(none):
        return [None if v != v else v for v in values]
    return [None if v == none else v for v in values]


def texts_in(values: Any, name: str, count: int) -> _Texts:
    if not values:
        return None
    if len(values) != count:
        raise BadRequest(f"{name} has {len(values)} values for {count} messages: give none, or one each")
    return [v or None for v in values]


def headers_in(values: Any, count: int) -> list[dict[str, str] | None] | None:
    if not values:
        return None
    if len(values) != count:
        raise BadRequest(f"headers has {len(values)} values for {count} messages: give none, or one each")
    read: dict[bytes, dict[str, str]] = {}
    found: list[dict[str, str] | None] = []
    for value in values:
        if (headers := read.get(spelled := value.SerializeToString())) is None:
            headers = read[spelled] = dict(value.values)
        found.append(headers.copy() or None)  # whoever holds a message may change them
    return found


def pack_headers(headers: Sequence[Mapping[str, str] | None]) -> list[Any]:
    """Messages of a batch mostly have the same ones. A protobuf map costs microseconds, to look for one does not."""
    packed: dict[tuple[tuple[str, str], ...], Any] = {}
    found = []
    for each in headers:
        pairs = tuple(each.items()) if each else ()
        if (made := packed.get(pairs)) is None:
            made = packed[pairs] = pb.Headers(values=dict(pairs))
        found.append(made)
    return found


# -- out ---------------------------------------------------------------------------------------------------------------


def pack_popped(popped: Popped) -> Any:
    columns = pb.PoppedColumns(
        count=len(popped.ids), ids=ints(popped.ids), tokens=ints(popped.tokens), priorities=ints(popped.priorities),
        payload_sizes=sizes_of(popped.payloads), payloads=b"".join(popped.payloads), attempts=bytes(popped.attempts),
        enqueued_ms=ints(popped.enqueued_ms), deadline_ms=ints(popped.deadline_ms),
    )  # fmt: skip
    if popped.partitions is not None:
        columns.partitions = np.asarray(popped.partitions, dtype="<u2").tobytes()
    if popped.keys is not None and any(popped.keys):
        columns.keys.extend([k or "" for k in popped.keys])
    if popped.fairness_keys is not None and any(popped.fairness_keys):
        columns.fairness_keys.extend([k or "" for k in popped.fairness_keys])
    if popped.headers is not None and any(popped.headers):
        columns.headers.extend(pack_headers(popped.headers))
    return columns


def popped_items(popped: Popped) -> list[Any]:
    count = len(popped.ids)
    deadlines = list(popped.deadline_ms) * (count if len(popped.deadline_ms) == 1 else 1)
    items = []
    for i in range(count):
        item = pb.Popped(
            id=popped.ids[i], token=popped.tokens[i], payload=popped.payloads[i], priority=int(popped.priorities[i]),
            attempts=popped.attempts[i], enqueued_ms=int(popped.enqueued_ms[i]), deadline_ms=deadlines[i],
            partition=0 if popped.partitions is None else int(popped.partitions[i]),
            key=popped.keys[i] if popped.keys else None,
            fairness_key=popped.fairness_keys[i] if popped.fairness_keys else None,
            headers=(popped.headers[i] or {}) if popped.headers else {},
        )  # fmt: skip
        items.append(item)
    return items


def unpack_messages(broker: Any, topic: str, columns: Any) -> list[Message]:
    """The messages of a pop's answer; they act through `broker`."""
    count = columns.count
    deadlines = read_ints(columns.deadline_ms, "deadline_ms").tolist()
    partitions: Any = repeat(0)
    if columns.partitions:
        partitions = unpack(columns.partitions, "<u2", "partitions", count).tolist()
    rows = zip(
        repeat(broker, count),
        repeat(topic),
        partitions,
        unpack(columns.ids, "<i8", "ids", count).tolist(),
        unpack(columns.tokens, "<i8", "tokens", count).tolist(),
        cut(columns.payloads, columns.payload_sizes, count),
        unpack(columns.priorities, "<i8", "priorities", count).tolist(),
        list(columns.attempts),
        texts_in(columns.keys, "keys", count) or repeat(None),
        headers_in(columns.headers, count) or repeat(None),
        unpack(columns.enqueued_ms, "<i8", "enqueued_ms", count).tolist(),
        repeat(deadlines[0]) if len(deadlines) == 1 else deadlines,
        texts_in(columns.fairness_keys, "fairness_keys", count) or repeat(None),
        strict=False,
    )
    return list(starmap(Message, rows))
