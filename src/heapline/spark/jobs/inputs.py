"""Where the jobs that stand on events take them from: the journal, or the lake with what the journal has beyond it.

Only which rows and columns are read is decided here; what they mean stands in docs/spark-schema.md. A job that needs
few columns says so: Spark cannot tell a Python source, and what is not named is not even decoded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from heapline.errors import BadRequest

#: By partition; of a batch [start, end).
Offsets = Mapping[int, int]


def events_of(
    spark: Any, where: Mapping[str, str] | None = None, lake: str | None = None, topic: str = "", *,
    columns: Sequence[str] | None = None, start: Offsets | None = None, end: Offsets | None = None,
) -> Any:  # fmt: skip
    """The events of a topic as a DataFrame, of the columns given or of all of the view.

    `where` are options of the format `heapline` (`path`, or `heapline.url` and so on): the journal. `lake` is the
    directory of an archive; with `where` as well, what the journal has beyond the archive follows without a gap.
    `start` and `end` are offsets by partition, for the journal alone.
    """
    if not topic:
        raise BadRequest("say which topic")
    if lake is not None:
        return _lake_events(spark, where, lake, topic, columns, start or end)
    if where is None:
        raise BadRequest("say where the events are: options of the format heapline (path, heapline.url), or a lake")
    return journal_events(spark, where, topic, columns=columns, start=start, end=end)


def _lake_events(
    spark: Any, where: Mapping[str, str] | None, lake: str, topic: str, columns: Sequence[str] | None, cut: Any
) -> Any:
    if cut:
        raise BadRequest("offsets cut the journal, not a lake: filter the DataFrame by partition and offset")
    from heapline.spark.jobs.lake import lake as read_lake  # type: ignore[import-not-found,unused-ignore]

    found = read_lake(spark, lake, where=None if where is None else dict(where), topic=topic, view="events")
    return found if columns is None else found.select(*columns)


def journal_events(
    spark: Any, where: Mapping[str, str], topic: str, *,
    columns: Sequence[str] | None = None, start: Offsets | None = None, end: Offsets | None = None,
    source: str = "heapline",
) -> Any:  # fmt: skip
    """What the journal has; a batch is pinned when it is loaded, so that it reads the same again. `source`: of which
    format with the same options."""
    reader = spark.read.format(source).options(**where).option("view", "events").option("subscribe", topic)
    if columns is not None:
        reader = reader.option("columns", ",".join(columns))
    for name, offsets in (("startingOffsets", start), ("endingOffsets", end)):
        if offsets is not None:
            reader = reader.option(name, json.dumps({topic: {str(p): o for p, o in offsets.items()}}))
    return reader.load()
