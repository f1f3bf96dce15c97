"""One topic's side of prepared batches: write, inspect, attach or drop a share in a turn of the topic.

A topic's share of a part is written to one unit, across all partitions: a topic holds a part completely or not at all.
The rules across several topics are in coordinator.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from heapline.contract.config import TopicConfig
from heapline.contract.errors import BadRequest, IdempotencyConflict
from heapline.contract.message import Enqueued
from heapline.core.events import EMPTY, I64, BatchPrepared
from heapline.core.now import Now
from heapline.core.prepared import Share
from heapline.engine.columns import BYTES_PER_PARTITION, EVENT_BYTES_PER_ROW, Columns, EnqueueCall, batch_bytes_max
from heapline.engine.runner import TopicRunner
from heapline.engine.topic import Topic

ROW_BYTES = EVENT_BYTES_PER_ROW + 24  # upper bound of what a message adds to a BatchPrepared event

_RARE = ("keys", "headers", "delays", "ttls", "retries", "tokens", "scopes", "fairness")

_encode = msgspec.msgpack.Encoder(enc_hook=dict).encode  # headers may be any mapping


class PartName(NamedTuple):
    """The name of a part of a batch, and a fingerprint that distinguishes parts of the same name."""

    batch_id: str
    part: str
    topics: list[str]
    fingerprint: bytes

    @property
    def nbytes(self) -> int:
        return 64 + 4 * (len(self.batch_id) + len(self.part) + sum(map(len, self.topics)) + 8 * len(self.topics))


def fingerprint_of(shares: Mapping[str, Columns], identity: tuple[object, ...]) -> bytes:
    """Return a fingerprint that is equal for equal content, in whichever form it was passed."""
    print_ = xxhash.xxh3_128(_encode(identity))
    for topic in sorted(shares):
        columns = shares[topic]
        times = columns.times()
        rest = [getattr(columns, name) for name in _RARE]
        rest.append(None if columns.seqs is None else columns.seqs.tolist())
        sizes = list(map(len, columns.payloads))
        print_.update(_encode((topic, sizes, None if times is None else times.tobytes(), rest)))
        print_.update(columns.priorities.tobytes())
        print_.update(b"".join(columns.payloads))
    return print_.digest()


def check_share_bytes(call: EnqueueCall, name: PartName, config: TopicConfig, topic: str) -> None:
    """Raise BadRequest if the share does not fit into one unit: it is written in one piece, as an atomic batch is."""
    spread = max(1, min(call.count, config.partitions))
    size = call.nbytes + call.count * ROW_BYTES + spread * (BYTES_PER_PARTITION + name.nbytes)
    limit = batch_bytes_max(config, call.count)
    if size > limit:
        raise BadRequest(
            f"part {name.part!r} takes {size} bytes in topic {topic!r}, over the {limit} that one unit can hold; "
            "prepare several parts and name all of them in the commit"
        )


# -- queries -----------------------------------------------------------------------------------------------------------


def holds(topic: Topic, batch_id: str) -> bool:
    return any(batch_id in p.entries.prepared.batches for p in topic.partitions)


def shares_of(topic: Topic, batch_id: str, part: str) -> list[Share]:
    """Return the shares of a part in the partitions of a topic; empty if it holds none."""
    held = [p.entries.prepared.batches.get(batch_id, {}).get(part) for p in topic.partitions]
    return [share for share in held if share is not None]


def batch_ids(topic: Topic) -> set[str]:
    return {batch_id for p in topic.partitions for batch_id in p.entries.prepared.batches}


class PartView(NamedTuple):
    """A topic's knowledge of a part."""

    topics: list[str]
    fingerprint: bytes
    messages: int


class TopicView(NamedTuple):
    """A topic's knowledge of a batch."""

    parts: dict[str, PartView]
    age_ms: int  # of the youngest part
    since: int  # of the oldest, steady ms
    left_out: list[int]  # of the named parts


def view(runner: TopicRunner, batch_id: str, parts: Sequence[str], now: Now) -> TopicView:
    """Return what a topic knows of a batch, and what a commit of the named parts would leave out."""
    seen: dict[str, PartView] = {}
    times, left_out = [], []
    for partition in runner.loaded.topic.partitions:
        for part, share in partition.entries.prepared.batches.get(batch_id, {}).items():
            before = seen[part].messages if part in seen else 0
            seen[part] = PartView(share.topics, share.fingerprint, before + share.count)
            times.append(share.at)
        left_out += partition.entries.prepared.twins(batch_id, parts)
    age = now.steady - max(times, default=0)
    return TopicView(seen, age, min(times, default=0), left_out)


# -- changes within a turn ---------------------------------------------------------------------------------------------


def prepare(runner: TopicRunner, name: PartName, call: EnqueueCall, now: Now) -> list[Enqueued]:
    """Write the topic's share of a part, or return the earlier answer if it already holds the share."""
    columns = call.columns
    assert columns is not None
    there = shares_of(runner.loaded.topic, name.batch_id, name.part)
    if there:
        return _answer_again(runner.loaded.topic, there, name, call.count)
    check_share_bytes(
        call, name, runner.loaded.topic.config, runner.name
    )  # the topic may have grown since the first check
    shares = runner.loaded.admission.judge(call, columns, now, name.batch_id)
    results = [Enqueued(0)] * call.count
    has_results = not (call.is_plain and call.is_quiet)  # plain calls have no duplicates
    made = []
    for share in shares:
        built = share.build(now, in_turn=False) if share.new.any() else None  # fairness turns are assigned at commit
        known: list[tuple[int, int]] = []  # (row of the call, id)
        for row, result in share.results() if has_results else ():
            results[row] = result
            if result.duplicate:
                known.append((row, result.id))
        index = share.index[share.new]
        event = BatchPrepared(0, 0, len(index), *name, now.steady, index, _column(known, 0), _column(known, 1))
        if built is not None:
            event.producers, event.keys = built[2].producers, built[2].keys
        made.append((share.partition, event, built))
    if not made:  # an empty part must be recorded too
        made.append(
            (runner.loaded.topic.partitions[0], BatchPrepared(0, 0, 0, *name, now.steady, EMPTY, EMPTY, EMPTY), None)
        )
    blocks = [built[1] for _, _, built in made if built is not None]
    total = sum(block.nbytes + 512 for block in blocks) + call.count * ROW_BYTES + len(made) * (512 + name.nbytes)
    runner.loaded.topic.reserve(runner.loaded.journal, total, now, blocks=len(blocks), frames=len(made))
    for partition, event, built in made:
        if built is None:
            runner.loaded.topic.emit(runner.loaded.journal, partition, event, now)
        else:
            runner.loaded.topic.emit_records(runner.loaded.journal, partition, event, built[0], built[1], now, built[3])
    if not has_results:
        return []
    runner.counters.duplicates += sum(result.duplicate for result in results)
    return results


def _column(pairs: list[tuple[int, int]], field: int) -> I64:
    return np.array([pair[field] for pair in pairs], dtype=np.int64)


def _answer_again(topic: Topic, shares: list[Share], name: PartName, count: int) -> list[Enqueued]:
    if any(share.fingerprint != name.fingerprint for share in shares):
        ids = [int(share.ids[0]) for share in shares if share.count]
        identity = f"part {name.part!r} of batch {name.batch_id!r}"
        raise IdempotencyConflict(identity, topic.ulid(ids[0]) if ids else "(none)")
    results = [Enqueued(0)] * count
    for share in shares:
        for row, id in zip(share.index.tolist(), share.ids.tolist(), strict=True):
            results[row] = Enqueued(id, False, None, topic.id_suffix)
        for row, id in zip(share.known.tolist(), share.known_ids.tolist(), strict=True):
            results[row] = Enqueued(id, True, None, topic.id_suffix)
    return results


def attach(runner: TopicRunner, batch_id: str, parts: Sequence[str], left_out: Sequence[int], now: Now) -> None:
    """Apply a commit: the named parts become messages, the others are dropped."""
    topic = runner.loaded.topic
    for partition in topic.partitions:
        if batch_id in partition.entries.prepared.batches:
            prepared = partition.entries.prepared
            for event in prepared.decide_commit(batch_id, parts, left_out, topic.take_seq, now.steady):
                if partition.fairness is not None and len(event.ids):
                    event.keys = partition.decide_turns(event)
                if topic.config.streams:
                    partition.place_in_stream(event)
                runner.loaded.emit(partition, event, now)
                runner.counters.enqueued += len(event.ids)


def drop(runner: TopicRunner, batch_id: str, now: Now) -> set[str]:
    """Apply an abort. Return the parts that were dropped."""
    parts: set[str] = set()
    for partition in runner.loaded.topic.partitions:
        parts |= partition.entries.prepared.batches.get(batch_id, {}).keys()
        event = partition.entries.prepared.decide_abort(batch_id, now.steady)
        if event is not None:
            runner.loaded.emit(partition, event, now)
    return parts
