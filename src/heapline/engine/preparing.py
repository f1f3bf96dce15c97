"""One topic's side of prepared batches: a share is written, looked at, attached or dropped, in a turn of the topic.

A topic's share of a part goes into one unit, over all partitions: a topic holds a part whole or not at all. What has
to hold over several topics is in batches.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from heapline.config import TopicConfig
from heapline.core.events import EMPTY, I64, BatchPrepared
from heapline.core.prepared import Share
from heapline.engine.calls import BYTES_PER_PARTITION, EVENT_BYTES_PER_ROW, EnqueueCall, batch_bytes_max
from heapline.engine.columns import Columns
from heapline.engine.runner import TopicRunner
from heapline.engine.topic import Topic
from heapline.errors import BadRequest, IdempotencyConflict
from heapline.model import Enqueued, Now
from heapline.ulid import to_ulid

ROW_BYTES = EVENT_BYTES_PER_ROW + 24  # an upper bound of what a message adds to a BatchPrepared event

_RARE = ("keys", "headers", "delays", "ttls", "retries", "tokens", "scopes", "seqs", "fairness")

_encode = msgspec.msgpack.Encoder(enc_hook=dict).encode  # headers may be any mapping


class PartName(NamedTuple):
    """Which part of which batch, and how to tell it from another of the same name."""

    batch_id: str
    part: str
    topics: list[str]
    fingerprint: bytes

    @property
    def nbytes(self) -> int:
        return 64 + 4 * (len(self.batch_id) + len(self.part) + sum(map(len, self.topics)) + 8 * len(self.topics))


def fingerprint_of(shares: Mapping[str, Columns], identity: tuple[object, ...]) -> bytes:
    """Equal for equal content, whichever way it was given."""
    print_ = xxhash.xxh3_128(_encode(identity))
    for topic in sorted(shares):
        columns = shares[topic]
        times = columns.times()
        rest = [getattr(columns, name) for name in _RARE]
        sizes = list(map(len, columns.payloads))
        print_.update(_encode((topic, sizes, None if times is None else times.tobytes(), rest)))
        print_.update(columns.priorities.tobytes())
        print_.update(b"".join(columns.payloads))
    return print_.digest()


def check_share_bytes(call: EnqueueCall, name: PartName, config: TopicConfig, topic: str) -> None:
    """A share is written at once, as an atomic batch is."""
    spread = max(1, min(call.count, config.partitions))
    size = call.nbytes + call.count * ROW_BYTES + spread * (BYTES_PER_PARTITION + name.nbytes)
    limit = batch_bytes_max(config, call.count)
    if size > limit:
        raise BadRequest(
            f"part {name.part!r} takes {size} bytes in topic {topic!r}, over the {limit} that are written at once: "
            "prepare several parts and name all of them in the commit"
        )


# -- looking -----------------------------------------------------------------------------------------------------------


def holds(topic: Topic, batch_id: str) -> bool:
    return any(batch_id in p.prepared.batches for p in topic.partitions)


def shares_of(topic: Topic, batch_id: str, part: str) -> list[Share]:
    """The shares of a part in the partitions of a topic; none if it is not there."""
    held = [p.prepared.batches.get(batch_id, {}).get(part) for p in topic.partitions]
    return [share for share in held if share is not None]


def batch_ids(topic: Topic) -> set[str]:
    return {batch_id for p in topic.partitions for batch_id in p.prepared.batches}


class PartView(NamedTuple):
    """What a topic knows of a part."""

    topics: list[str]
    fingerprint: bytes
    messages: int


class TopicView(NamedTuple):
    """What a topic knows of a batch."""

    parts: dict[str, PartView]
    age_ms: int  # of the youngest part
    since: int  # of the oldest, steady ms
    left_out: list[int]  # of the named parts


def view(runner: TopicRunner, batch_id: str, parts: Sequence[str], now: Now) -> TopicView:
    """What a topic knows of a batch; of the named parts also what a commit of them would leave out."""
    seen: dict[str, PartView] = {}
    times, left_out = [], []
    for partition in runner.topic.partitions:
        for part, share in partition.prepared.batches.get(batch_id, {}).items():
            before = seen[part].messages if part in seen else 0
            seen[part] = PartView(share.topics, share.fingerprint, before + share.count)
            times.append(share.at)
        left_out += partition.prepared.twins(batch_id, parts)
    age = now.steady - max(times, default=0)
    return TopicView(seen, age, min(times, default=0), left_out)


# -- changing: within a turn -------------------------------------------------------------------------------------------


def prepare(runner: TopicRunner, name: PartName, call: EnqueueCall, now: Now) -> list[Enqueued]:
    """Write the topic's share of a part, or answer as before if it is there."""
    columns = call.columns
    assert columns is not None
    there = shares_of(runner.topic, name.batch_id, name.part)
    if there:
        return _answer_again(there, name, call.count)
    check_share_bytes(call, name, runner.topic.config, runner.name)  # the topic may have grown since it was measured
    shares = runner.admission.judge(call, columns, now, name.batch_id)
    results = [Enqueued(0)] * call.count
    told = not (call.is_plain and call.wants_ids)  # see EnqueueCall; then there are no duplicates to be found either
    made = []
    for share in shares:
        built = share.build(now, in_turn=False) if share.new.any() else None  # turns are given when it is committed
        known: list[tuple[int, int]] = []  # (row of the call, id)
        for row, result in share.results() if told else ():
            results[row] = result
            if result.duplicate:
                known.append((row, result.id))
        index = share.index[share.new]
        event = BatchPrepared(0, 0, len(index), *name, now.steady, index, _column(known, 0), _column(known, 1))
        if built is not None:
            event.producers, event.keys = built[2].producers, built[2].keys
        made.append((share.partition, event, built))
    if not made:  # a part may well be empty; it must be known all the same
        made.append((runner.topic.partitions[0], BatchPrepared(0, 0, 0, *name, now.steady, EMPTY, EMPTY, EMPTY), None))
    blocks = [built[1] for _, _, built in made if built is not None]
    total = sum(block.nbytes + 512 for block in blocks) + call.count * ROW_BYTES + len(made) * (512 + name.nbytes)
    runner.topic.reserve(runner.journal, total, now, blocks=len(blocks), frames=len(made))
    for partition, event, built in made:
        if built is None:
            runner.topic.emit(runner.journal, partition, event, now)
        else:
            runner.topic.emit_records(runner.journal, partition, event, built[0], built[1], now, built[3])
    if not told:
        return []
    runner.admission.duplicates += sum(result.duplicate for result in results)
    return results


def _column(pairs: list[tuple[int, int]], field: int) -> I64:
    return np.array([pair[field] for pair in pairs], dtype=np.int64)


def _answer_again(shares: list[Share], name: PartName, count: int) -> list[Enqueued]:
    if any(share.fingerprint != name.fingerprint for share in shares):
        ids = [int(share.ids[0]) for share in shares if share.count]
        identity = f"part {name.part!r} of batch {name.batch_id!r}"
        raise IdempotencyConflict(identity, to_ulid(ids[0]) if ids else "(none)")
    results = [Enqueued(0)] * count
    for share in shares:
        for row, id in zip(share.index.tolist(), share.ids.tolist(), strict=True):
            results[row] = Enqueued(id)
        for row, id in zip(share.known.tolist(), share.known_ids.tolist(), strict=True):
            results[row] = Enqueued(id, True)
    return results


def attach(runner: TopicRunner, batch_id: str, parts: Sequence[str], left_out: Sequence[int], now: Now) -> None:
    """Carry out a commit: the named parts become messages, the others go."""
    topic = runner.topic
    for partition in topic.partitions:
        if batch_id in partition.prepared.batches:
            for event in partition.prepared.decide_commit(batch_id, parts, left_out, topic.take_seq, now.steady):
                if partition.fair is not None and len(event.ids):
                    event.keys = partition.decide_turns(event)
                if topic.config.streams:
                    event = partition.decide_places(event)
                runner.emit(partition, event, now)
                runner.admission.enqueued += len(event.ids)


def drop(runner: TopicRunner, batch_id: str, now: Now) -> set[str]:
    """Carry out an abort; which parts were there."""
    parts: set[str] = set()
    for partition in runner.topic.partitions:
        parts |= partition.prepared.batches.get(batch_id, {}).keys()
        event = partition.prepared.decide_abort(batch_id, now.steady)
        if event is not None:
            runner.emit(partition, event, now)
    return parts
