"""Whether a journal is the one that a lake was made from, or another with a topic of the same name.

Incarnations tell topics of one broker apart, not those of two, nor those before and after a data directory was begun
anew. So one row is compared that both should have: the first that the journal shows of those whose unit and time its
index knows. It is looked for in the table of events alone, among the rows of its day. Of a day before the lake's first,
which upkeep may have dropped, nothing can be said.
"""

from __future__ import annotations

from typing import Any

from heapline.errors import BadRequest
from heapline.model import from_ms
from heapline.spark.lake.tables import LakeTable
from heapline.spark.log import TopicLog

LATEST_DAY = "9999-12-31"


class OtherJournal(BadRequest):
    """A row of the journal is not what the lake has in its place."""


def check_same(table: LakeTable, log: TopicLog) -> None:
    kept = table.kept(log.ref.topic)
    if kept is None or table.view != "events":
        return
    marks, starts = log.marks(), log.starts()
    for partition, end in kept.ends.items():
        mine = marks.of(partition)
        # Below its start the journal may have rows that nobody is shown, so the lake may have been begun without them.
        shown = mine[mine["first_offset"] >= starts.get(partition, 0)]
        if len(shown) and int(shown["first_offset"][0]) < end:
            _compare(table, log.ref.topic, partition, shown[0])
            return


def _compare(table: LakeTable, topic: str, partition: int, mark: Any) -> None:
    import pyarrow.dataset as ds

    offset, unit, at = int(mark["first_offset"]), int(mark["unit"]), from_ms(int(mark["time"]))
    files, day = table.files([topic]), at.date().isoformat()
    if day < min((file.date for file in files), default=LATEST_DAY):
        return
    near = [file.uri for file in files if file.date == day]
    wanted = (ds.field("partition") == partition) & (ds.field("offset") == offset)
    rows = ds.dataset(near).to_table(columns=["unit", "timestamp"], filter=wanted).to_pylist() if near else []
    if rows != [{"unit": unit, "timestamp": at}]:
        raise OtherJournal(
            f"row {offset} of partition {partition} of topic {topic!r} is not the one that the lake has: it is another "
            "broker's, or the data directory was begun anew. Archive it to another lake, or remove the topic's rows "
            f"from this one: heapline pipeline lake drop --topic {topic}"
        )
