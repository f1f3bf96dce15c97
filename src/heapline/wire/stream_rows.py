"""Rows of a stream, groups and places on the gRPC wire: columns as they are, with no object made for a row.

What a peer sends is checked here for its form; what the values may be is the broker's to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from heapline.config import GroupConfig
from heapline.errors import BadRequest, DeliveryLost
from heapline.streams import (
    Fetched,
    GroupDeadLetter,
    GroupInfo,
    GroupOffset,
    Offsets,
    Payloads,
    Place,
    StreamBatch,
)
from heapline.wire.columns import from_us, headers_in, ints, pack_headers, read_ints, sizes_of, texts_in, to_us, unpack
from heapline.wire.json_shapes import config_json, read_group_settings
from heapline.wire.schema import pb
from heapline.wire.shapes import given, moment

I64 = npt.NDArray[np.int64]
ROWS_MAX, PARTS_MAX = 1 << 20, 10_000  # in one request
_OFFSET = ("partition", "committed", "end", "lag", "outstanding", "retrying", "dead")

# -- rows --------------------------------------------------------------------------------------------------------------


def pack_batch(batch: StreamBatch) -> Any:
    sizes, blob = _blob(batch.payloads)
    columns = pb.StreamColumns(
        partition=batch.partition, count=len(batch), offsets=ints(batch.offsets), ids=ints(batch.ids),
        priorities=ints(batch.priorities), attempts=np.asarray(batch.attempts, dtype="u1").tobytes(),
        enqueued_ms=ints(batch.enqueued_ms), payload_sizes=sizes, payloads=blob,
    )  # fmt: skip
    if batch.keys is not None and any(batch.keys):
        columns.keys.extend([key or "" for key in batch.keys])
    if batch.fairness_keys is not None and any(batch.fairness_keys):
        columns.fairness_keys.extend([key or "" for key in batch.fairness_keys])
    if batch.headers is not None and any(batch.headers):
        columns.headers.extend(pack_headers(batch.headers))
    return columns


def _blob(payloads: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Their sizes, and all of them as one; what lies together is copied together."""
    if not isinstance(payloads, Payloads):
        return sizes_of(payloads), b"".join(payloads)
    starts, ends, data = payloads.starts, payloads.ends, payloads.data
    if not len(starts):
        return b"", b""
    first = np.flatnonzero(np.append(True, starts[1:] != ends[:-1]))  # of each run that has no gaps
    runs = zip(starts[first].tolist(), ends[np.append(first[1:], len(ends)) - 1].tolist(), strict=True)
    return (ends - starts).astype("<u4").tobytes(), b"".join([data[a:b] for a, b in runs])


def unpack_batch(settles: Any, topic: str, columns: Any) -> StreamBatch:
    count = columns.count
    sizes = unpack(columns.payload_sizes, "<u4", "payload_sizes", count).astype(np.int64)
    ends = np.cumsum(sizes)
    if (int(ends[-1]) if count else 0) != len(columns.payloads):
        raise BadRequest(f"payload_sizes do not add up to the {len(columns.payloads)} bytes of payloads")
    payloads = Payloads(memoryview(columns.payloads), ends - sizes, ends)
    return StreamBatch(
        settles, topic, columns.partition,
        _column(columns, "offsets"), _column(columns, "ids"), payloads, _column(columns, "priorities"),
        unpack(columns.attempts, "u1", "attempts", count).astype(np.int64), _column(columns, "enqueued_ms"),
        texts_in(columns.keys, "keys", count), headers_in(columns.headers, count),
        texts_in(columns.fairness_keys, "fairness_keys", count),
    )  # fmt: skip


def _column(columns: Any, name: str) -> I64:
    found: I64 = unpack(getattr(columns, name), "<i8", name, columns.count).astype(np.int64, copy=False)
    return found


def pack_assignment(partitions: Sequence[int], generation: int) -> Any:
    return pb.Assignment(partitions=partitions, generation=generation)


def pack_fetched(topic: str, fetched: Fetched) -> Any:
    return pb.GroupFetched(
        topic=topic, batches=map(pack_batch, fetched.batches),
        assignment=pack_assignment(fetched.partitions, fetched.generation),
    )  # fmt: skip


def unpack_fetched(settles: Any, topic: str, answer: Any) -> Fetched:
    batches = [unpack_batch(settles, topic, columns) for columns in answer.batches]
    return Fetched(batches, list(answer.assignment.partitions), answer.assignment.generation)


# -- which rows --------------------------------------------------------------------------------------------------------


def pack_rows(offsets: Offsets) -> list[Any]:
    return [pb.PartitionRows(partition=p, offsets=ints(some)) for p, some in offsets.items()]


def unpack_rows(rows: Any) -> dict[int, Any]:
    """{partition: offsets}, these as columns. What names more rows than anybody can hold is not even looked at: to
    find out that each of them is lost would keep all others waiting."""
    count = sum(len(part.offsets) for part in rows) // 8
    if count > ROWS_MAX or len(rows) > PARTS_MAX:
        raise BadRequest(f"at most {ROWS_MAX} rows, in {PARTS_MAX} parts, are named at a time, not {count}")
    found: dict[int, list[Any]] = {}
    for part in rows:
        found.setdefault(part.partition, []).append(read_ints(part.offsets, "offsets"))
    return {p: some[0] if len(some) == 1 else np.concatenate(some) for p, some in found.items()}


def pack_lost(lost: DeliveryLost) -> list[Any]:
    by_partition: dict[int, list[int]] = {}
    for partition, offset in zip(lost.partitions, lost.offsets, strict=True):
        by_partition.setdefault(partition, []).append(offset)
    return pack_rows(by_partition)


def unpack_lost(rows: Any, topic: str, group: str) -> DeliveryLost | None:
    """None: all was carried out."""
    found = unpack_rows(rows)
    partitions = [p for p, offsets in found.items() for _ in range(len(offsets))]
    offsets = [offset for some in found.values() for offset in some.tolist()]
    return DeliveryLost(partitions, offsets, topic, group) if offsets else None


# -- groups ------------------------------------------------------------------------------------------------------------


def pack_place(place: Place) -> Any:
    if isinstance(place, str):
        return pb.StreamPlace(edge=place)
    if isinstance(place, datetime):
        return pb.StreamPlace(at_us=to_us(place))
    if isinstance(place, Mapping):
        return pb.StreamPlace(offsets=pb.OffsetByPartition(values=place))
    return pb.StreamPlace(offset=place)


def unpack_place(request: Any, field: str) -> Place | None:
    """None: it was not given."""
    if not request.HasField(field):
        return None
    place = getattr(request, field)
    kind = place.WhichOneof("place")
    if kind == "at_us":
        return from_us(place.at_us)
    if kind == "offsets":
        return dict(place.offsets.values)
    found: Place | None = getattr(place, kind) if kind else None
    return found


def group_config_json(fields: Mapping[str, Any]) -> str:
    return config_json(dict(fields), "group") if fields else ""


def read_group_config(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        fields = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise BadRequest(f"config_json is not JSON: {error}") from None
    except RecursionError:
        fields = None
    if not isinstance(fields, dict):
        raise BadRequest("config_json is an object of settings")
    return read_group_settings(fields)


def pack_offset(offset: GroupOffset) -> Any:
    return pb.GroupOffset(member=offset.member, **{name: getattr(offset, name) for name in _OFFSET})


def unpack_offset(offset: Any) -> GroupOffset:
    return GroupOffset(member=given(offset, "member"), **{name: getattr(offset, name) for name in _OFFSET})


def pack_offsets(offsets: Sequence[GroupOffset]) -> Any:
    return pb.GroupOffsetsResponse(offsets=map(pack_offset, offsets))


def pack_group(info: GroupInfo) -> Any:
    return pb.GroupInfo(
        topic=info.topic, group=info.name, config_json=msgspec.json.encode(info.config).decode(),
        generation=info.generation, members={m: pb.Partitions(partitions=p) for m, p in info.members.items()},
        offsets=map(pack_offset, info.offsets), used_at_us=None if info.used_at is None else to_us(info.used_at),
        holding=info.holding,
    )  # fmt: skip


def unpack_group(info: Any) -> GroupInfo:
    return GroupInfo(
        name=info.group, topic=info.topic, config=msgspec.json.decode(info.config_json, type=GroupConfig),
        generation=info.generation, members={m: list(p.partitions) for m, p in sorted(info.members.items())},
        offsets=list(map(unpack_offset, info.offsets)), used_at=moment(info, "used_at_us"), holding=info.holding,
    )  # fmt: skip


def pack_dead(letter: GroupDeadLetter) -> Any:
    return pb.GroupDeadLetter(
        partition=letter.partition, offset=letter.offset, id=letter.id, attempts=letter.attempts, reason=letter.reason,
        died_at_us=None if letter.died_at is None else to_us(letter.died_at), payload=letter.payload,
        priority=letter.priority, key=letter.key, headers=letter.headers,
    )  # fmt: skip


def unpack_dead(letter: Any) -> GroupDeadLetter:
    return GroupDeadLetter(
        partition=letter.partition, offset=letter.offset, id=letter.id, attempts=letter.attempts, reason=letter.reason,
        died_at=moment(letter, "died_at_us"), payload=given(letter, "payload"), priority=given(letter, "priority"),
        key=given(letter, "key"), headers=dict(letter.headers),
    )  # fmt: skip
