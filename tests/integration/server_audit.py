"""Check the log of a server's topics against the record of its clients (server_load.py).

`BatchAudit` replays a partition's log as audit.py does, with prepared batches. `check_record` then checks that
everything that was answered is in it once, and which client each lease was granted to.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import heapline
from tests.integration.audit import LogAudit
from tests.integration.server_load import TOPICS, Record


class BatchAudit(LogAudit):
    def __init__(self) -> None:
        super().__init__()
        self.prepared: dict[str, dict[int, tuple[int, str]]] = {}  # batch -> id -> priority, tag
        self.holders: dict[tuple[int, int], str | None] = {}  # id, token

    async def read(self, hl: heapline.Broker, topic: str, partition: int = 0) -> None:
        async for frame in hl.read_log(topic, partition):
            for event in frame.events:
                assert event.offset == self.rows, "offsets are not dense"
                self.rows += event.row_count
                getattr(self, f"_{event.kind}")(event, frame.time_ms)

    def _leased(self, event: Any, at: int) -> None:
        super()._leased(event, at)
        columns = zip(
            event.columns["ids"].tolist(), event.columns["tokens"].tolist(), event.columns["holders"], strict=True
        )
        self.holders.update({(id, token): holder for id, token, holder in columns})

    def _producer_opened(self, event: Any, _: int) -> None: ...

    def _moved(self, event: Any, _: int) -> None: ...

    def _batch_prepared(self, event: Any, _: int) -> None:
        messages = event.columns["messages"]
        if not len(messages["ids"]):
            return
        batch = self.prepared.setdefault(event.columns["batch_id"], {})
        rows = zip(messages["ids"].tolist(), messages["priority"].tolist(), event.payloads, strict=True)
        for id, priority, payload in rows:
            assert id not in batch
            assert id not in self.priority, f"message {id} was prepared twice"
            batch[id] = (priority, payload.partition(b" ")[0].decode())

    def _batch_committed(self, event: Any, _: int) -> None:
        batch = self.prepared[event.columns["batch_id"]]
        ids = event.columns.get("ids")
        for id in () if ids is None else ids.tolist():
            self.priority[id], self.tags[id] = batch.pop(id)
            self._wait(id, 0)
        if not event.columns["more"]:
            del self.prepared[event.columns["batch_id"]]

    def _batch_aborted(self, event: Any, _: int) -> None:
        self.prepared.pop(event.columns["batch_id"], None)


async def audit_topics(hl: heapline.Broker) -> dict[str, list[BatchAudit]]:
    found: dict[str, list[BatchAudit]] = {}
    for topic in TOPICS:
        found[topic] = []
        for partition in range(len(await hl.offsets(topic))):
            found[topic].append(audit := BatchAudit())
            await audit.read(hl, topic, partition)
    return found


def check_record(record: Record, audits: dict[str, list[BatchAudit]]) -> None:
    for topic, parts in audits.items():
        ids: dict[str, list[int]] = {}
        for audit in parts:
            for id, tag in audit.tags.items():
                ids.setdefault(tag, []).append(id)
        check_enqueued(record, topic, ids)
        happened = set().union(*(audit.happened for audit in parts))
        ended = [(how, id, token) for how, name, id, token in record.ended if name == topic and how != "extend"]
        missing = [end for end in ended if end not in happened]
        assert not missing, f"answered, but not in the log: {missing[:5]}"
        holders = {lease: holder for audit in parts for lease, holder in audit.holders.items()}
        for (name, id, token), holder in record.delivered.items():
            if name == topic:
                assert holders.get((id, token)) == holder, f"the lease {token} of {id} is not {holder}'s in the log"


def check_enqueued(record: Record, topic: str, ids: dict[str, list[int]]) -> None:
    twice = {tag: found for tag, found in ids.items() if len(found) > 1}
    assert not twice, f"enqueued more than once: {twice}"
    for group in record.groups:
        if group.topic != topic:
            continue
        there = [tag for tag in group.tags if tag in ids]
        assert len(there) in (0, len(group.tags)), f"{len(there)} of {len(group.tags)} messages of one call are there"
        assert there or not group.answered, f"answered and not in the log: {group.tags}"
        assert not there or not group.dropped, f"aborted but in the log: {group.tags}"
        for tag in there if group.answered else ():
            assert record.ids[tag] == (topic, ids[tag][0]), f"{tag} was answered with another id than in the log"


def lives(audits: dict[str, list[BatchAudit]]) -> Counter[str]:
    return sum((audit.states() for parts in audits.values() for audit in parts), Counter())
