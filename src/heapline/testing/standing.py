"""What stands in a topic: every message that it holds, read from the engine's own tables without asking for a turn.

For tests, on a broker in memory: it reads each living record, and blocks while it does.
"""

from __future__ import annotations

import numpy as np

from heapline.core.ids import partition_of
from heapline.engine import facts
from heapline.engine.runner import TopicRunner
from heapline.model import MessageInfo


def standing(runner: TopicRunner) -> list[MessageInfo]:
    """All living messages, oldest first; those of batches that are not committed do not stand anywhere yet."""
    topic = runner.topic
    places = [topic.layout.pack(segment, topic.live.places(segment), 0) for segment in topic.live.segments()]
    positions = np.concatenate(places) if places else np.zeros(0, dtype=np.int64)
    if not len(positions):
        return []
    records, missing = runner.journal.cached(positions)
    if len(missing):
        records.fill(missing, runner.journal.load(positions[missing]))
    found: list[MessageInfo] = []
    for i in range(len(positions)):
        if i in records.bad:
            continue
        record = facts.Record(records, i)
        partition = topic.partitions[int(partition_of(record.id))]
        where = partition.find(record.id)
        if where is not None:
            found.append(facts.living(partition, runner.name, record.id, where, record))
    return sorted(found, key=lambda info: info.id)
