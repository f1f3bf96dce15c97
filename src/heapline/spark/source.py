"""The format `heapline` as Spark sees it: a data source, its batch reader and its stream reader. (Writers: sink.py.)

Spark makes these objects in processes of its own and pickles them from one to the other, so they hold options and
nothing that is open. Thin: what is read is decided in positions.py and planning.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from heapline.spark.following import Following
from heapline.spark.narrowing import Narrowing
from heapline.spark.options import ReadOptions, parse_columns, parse_options
from heapline.spark.planning import Work, plan_batch, read
from heapline.spark.progress import Progress
from heapline.spark.schema import OF_A_MOMENT, spark_ddl
from heapline.spark.sink import stream_writer_of, writer_of
from heapline.spark.sources import client_of, settled, source_of
from heapline.spark.state import StateWork, plan_state, read_state
from heapline.spark.write_options import WriteOptions, parse_write, settled_write, spark_columns


class Piece(InputPartition):
    def __init__(self, work: Work | StateWork) -> None:
        self.work = work


class HeaplineSource(DataSource):
    """`spark.read.format("heapline")`, and `readStream`; `df.write`, and `writeStream`."""

    @classmethod
    def name(cls) -> str:
        return "heapline"

    def schema(self) -> str:
        return spark_ddl(parse_columns(self.options))

    def reader(self, schema: Any) -> DataSourceReader:
        options = settled(parse_options(self.options, streaming=False))
        return FilteringReader(options) if options.pushdown else BatchReader(options)

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return StreamReader(settled(parse_options(self.options, streaming=True)))

    def writer(self, schema: Any, overwrite: bool) -> DataSourceWriter:
        return writer_of(self._write_options(schema, overwrite, streaming=False))

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        return stream_writer_of(self._write_options(schema, overwrite, streaming=True))

    def _write_options(self, schema: Any, overwrite: bool, *, streaming: bool) -> WriteOptions:
        columns = spark_columns(schema)
        return settled_write(parse_write(self.options, columns, streaming=streaming, overwrite=overwrite))


class BatchReader(DataSourceReader):
    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._narrowing: Narrowing | None = None

    def partitions(self) -> list[InputPartition]:
        source = source_of(self._options)
        if self._options.view in OF_A_MOMENT:  # filters are Spark's alone here
            return [Piece(work) for work in plan_state(source, self._options)]
        return [Piece(work) for work in plan_batch(source, self._options, self._narrowing)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, Piece):
            return iter(())  # Spark reads one empty partition where there is none
        if isinstance(partition.work, StateWork):
            return read_state(source_of(self._options), partition.work, self._options)
        return read(source_of(self._options), partition.work, self._options)


class FilteringReader(BatchReader):
    """A class of its own: that it has this method is what Spark goes by."""

    def pushFilters(self, filters: list[Any]) -> Iterator[Any]:
        self._narrowing = Narrowing()
        for found in filters:
            # Of one column, not of a field within: `column` is a path.
            column: tuple[str, ...] = getattr(found, "attribute", ())
            value = getattr(found, "value", None)
            if len(column) == 1 and value is not None:
                self._narrowing.take(column[0], type(found).__name__, value)
            yield found  # Spark applies it once more


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._following: Following | None = None
        self._progress: Progress | None = None

    def _opened(self) -> Following:
        if self._following is None:
            self._following = Following(source_of(self._options), self._options)
        return self._following

    def initialOffset(self) -> dict[str, Any]:
        return self._opened().first()

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_rows is not None:
            return ReadMaxRows(self._options.max_rows)
        return ReadAllAvailable() if self._options.min_rows is None else ReadMinRows(self._options.min_rows)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return self._opened().next_end(start, rows, not isinstance(limit, ReadAllAvailable), time.monotonic())

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._opened().last()

    def prepareForTriggerAvailableNow(self) -> None:
        self._opened().stop_here()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [Piece(work) for work in self._opened().plan(start, end)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, Piece):
            return iter(())
        assert isinstance(partition.work, Work)
        return read(source_of(self._options), partition.work, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        if self._options.group is not None:
            if self._progress is None:
                self._progress = Progress(self._options.group, partial(client_of, self._options.target))
            self._progress.publish(end)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.close()
        if self._following is not None:
            self._following.close()
