"""From rows of any table to the columns that the sink takes, by SQL that somebody wrote.

The SQL is Spark's: a condition, and expressions with names, as between SELECT and FROM. What is wrong with it, or with
what it gives, is told before anything is written.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from heapline.errors import BadRequest

VALUE = "value"
AS_JSON = f"to_json(struct(*)) AS {VALUE}"


def shaped(spark: Any, rows: Any, select: str | None = None, condition: str | None = None) -> Any:
    """Filtered and selected. Without a select a table that has a column `value` stays as it is; of any other each row
    becomes a JSON object."""
    with told_plainly():
        found = rows if condition is None else rows.where(condition)
        if select is None:
            return found if VALUE in found.columns else found.selectExpr(AS_JSON)
        return selected(spark, found, select)


def selected(spark: Any, rows: Any, select: str) -> Any:
    """`SELECT {select} FROM rows`."""
    view = f"heapline_rows_{secrets.token_hex(6)}"
    rows.createOrReplaceTempView(view)
    try:
        return spark.sql(f"SELECT {select} FROM {view}")
    finally:
        spark.catalog.dropTempView(view)


def sink_columns(options: Mapping[str, str], rows: Any) -> tuple[str, ...]:
    """The columns, if they are such as the sink takes; BadRequest says which is not."""
    from heapline.spark.write_options import parse_write, spark_columns

    return parse_write(options, spark_columns(rows.schema), streaming=False, overwrite=False).columns


@contextmanager
def told_plainly() -> Iterator[None]:
    """What Spark's parser has against the SQL, without the plan and the stack that it adds, and logs."""
    from pyspark.errors import AnalysisException, ParseException

    log = logging.getLogger("SQLQueryContextLogger")
    was_off, log.disabled = log.disabled, True
    try:
        yield
    except (AnalysisException, ParseException) as error:
        raise BadRequest(f"Spark cannot do that: {str(error).strip().splitlines()[0]}") from None
    finally:
        log.disabled = was_off
