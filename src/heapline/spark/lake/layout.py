"""How the lake's tables look: one per view, partitioned by namespace, topic and date, with the columns of the view.

`topic` is the view's own column, and needs no other name: it is the same in all rows of a file, so it stands in the
table's log and in the file's path, not in the file. Added are `namespace` and `date`, the UTC day of enqueue for
messages and of the event's timestamp for events. All columns may be null, so that some can be added or erased later.
"""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from heapline.errors import BadRequest
from heapline.spark.schema import VIEWS, Column, arrow_types

PARTITIONED_BY = ("namespace", "topic", "date")
#: Whose UTC day is a row's `date`.
DAY_OF = {"messages": "enqueued_at", "events": "timestamp"}
DAY_US = 86_400_000_000
EPOCH_DAY = date(1970, 1, 1)
#: Of these a file's least and greatest value stand in the table's log: readers pass over files by them.
MEASURED = ("partition", "offset", "timestamp", "enqueued_at", "priority", "id", "unit")


def check_views(views: tuple[str, ...]) -> None:
    if not views or len(set(views)) < len(views) or any(view not in DAY_OF for view in views):
        raise BadRequest(f"views are some of {', '.join(DAY_OF)}, each once, not {', '.join(views) or 'none'}")


def stored_columns(view: str) -> tuple[Column, ...]:
    """Those that stand in files, in their order."""
    return tuple(column for column in VIEWS[view] if column.name not in PARTITIONED_BY)


def table_columns(view: str) -> tuple[tuple[str, str], ...]:
    """(name, Spark type) of all columns: the view's, then those that the lake adds."""
    own = [(column.name, column.type) for column in VIEWS[view]]
    return (*own, ("namespace", "string"), ("date", "date"))


def file_schema(view: str) -> Any:
    import pyarrow as pa

    types = arrow_types()
    return pa.schema([pa.field(column.name, types[column.type]) for column in stored_columns(view)])


def table_schema(view: str) -> Any:
    import pyarrow as pa

    types = {**arrow_types(), "date": pa.date32()}
    return pa.schema([pa.field(name, types[kind]) for name, kind in table_columns(view)])


def namespace_of(topic: str) -> str:
    """
    >>> namespace_of("orders"), namespace_of("billing/orders")
    ('default', 'billing')
    """
    namespace, has_one, _ = topic.rpartition("/")
    return namespace if has_one else "default"


def folder_of(topic: str, day: date) -> str:
    """Within a table, as Hive has it.

    >>> folder_of("billing/orders", date(2026, 1, 31))
    'namespace=billing/topic=billing%2Forders/date=2026-01-31'
    """
    return f"namespace={namespace_of(topic)}/topic={quote(topic, safe='')}/date={day.isoformat()}"


def day_of(number: int) -> date:
    """
    >>> day_of(20_000)
    datetime.date(2024, 10, 4)
    """
    return EPOCH_DAY + timedelta(days=number)


def lake_path(lake_dir: str | Path) -> str:
    """The lake's directory, absolute. A URL must be one of a file."""
    text = str(lake_dir)
    if "://" in text:
        parts = urlsplit(text)
        if parts.scheme != "file" or parts.netloc:
            raise BadRequest(f"{text!r}: a lake is a directory that driver and executors share, or file:///its/path")
        text = unquote(parts.path)
    if not text:
        raise BadRequest("say where the lake is: a directory")
    return str(Path(text).absolute())
