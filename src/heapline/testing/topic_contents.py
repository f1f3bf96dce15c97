"""The contents of a topic: every message that it holds, read from the engine's own tables without a turn.

For tests with an in-memory broker: it reads each live record, and blocks meanwhile.
"""

from __future__ import annotations

import numpy as np

from heapline.contract.message import MessageInfo
from heapline.core.ids import partition_of
from heapline.engine.lookup import Record, living
from heapline.engine.runner import TopicRunner


def standing(runner: TopicRunner) -> list[MessageInfo]:
    """Return all live messages, oldest first. Messages of uncommitted batches are not included."""
    topic = runner.loaded.topic
    places = [topic.layout.pack(segment, topic.live.places(segment), 0) for segment in topic.live.segments()]
    positions = np.concatenate(places) if places else np.zeros(0, dtype=np.int64)
    if not len(positions):
        return []
    records, missing = runner.loaded.journal.cached(positions)
    if len(missing):
        records.fill(missing, runner.loaded.journal.load(positions[missing]))
    found: list[MessageInfo] = []
    for i in range(len(positions)):
        if i in records.bad:
            continue
        record = Record(records, i)
        partition = topic.partitions[int(partition_of(record.id))]
        where = partition.find(record.id)
        if where is not None:
            found.append(living(topic, partition, record.id, where, record))
    return sorted(found, key=lambda info: info.id)
