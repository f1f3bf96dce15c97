"""The format `heapline` for Spark: the data source, its batch reader and its stream reader. (Writers: sink.py.)

Spark creates these objects in its own processes and pickles them between processes, so they hold options and nothing
that is open. offsets.py and read_plan.py decide what is read.
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

from heapline.spark.offsets import ObserverGroup
from heapline.spark.options import ReadOptions, parse_columns, parse_options
from heapline.spark.read_plan import Pushdown, ReadTask, StreamPlan, plan_batch, read
from heapline.spark.schema import STATE_VIEWS, spark_ddl
from heapline.spark.sink import stream_writer_of, writer_of
from heapline.spark.target import client_of, resolve, source_of
from heapline.spark.views.scan import ScanTask, read_scan
from heapline.spark.views.state import StateTask, plan_state, read_state
from heapline.spark.write_options import WriteOptions, parse_write, spark_columns


class TaskPartition(InputPartition):
    def __init__(self, task: ReadTask | StateTask | ScanTask) -> None:
        self.task = task


class HeaplineSource(DataSource):
    """`spark.read.format("heapline")` and `readStream`; `df.write` and `writeStream`."""

    @classmethod
    def name(cls) -> str:
        return "heapline"

    def schema(self) -> str:
        return spark_ddl(parse_columns(self.options))

    def reader(self, schema: Any) -> DataSourceReader:
        options = resolve(parse_options(self.options, streaming=False))
        return FilteringReader(options) if options.pushdown else BatchReader(options)

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return StreamReader(resolve(parse_options(self.options, streaming=True)))

    def writer(self, schema: Any, overwrite: bool) -> DataSourceWriter:
        return writer_of(self._write_options(schema, overwrite, streaming=False))

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        return stream_writer_of(self._write_options(schema, overwrite, streaming=True))

    def _write_options(self, schema: Any, overwrite: bool, *, streaming: bool) -> WriteOptions:
        columns = spark_columns(schema)
        return resolve(parse_write(self.options, columns, streaming=streaming, overwrite=overwrite))


class BatchReader(DataSourceReader):
    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._pushdown: Pushdown | None = None

    def partitions(self) -> list[InputPartition]:
        source = source_of(self._options)
        if self._options.view in STATE_VIEWS:  # only Spark filters these
            return [TaskPartition(task) for task in plan_state(source, self._options)]
        return [TaskPartition(task) for task in plan_batch(source, self._options, self._pushdown)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, TaskPartition):
            return iter(())  # if there are no partitions, Spark reads one empty partition
        if isinstance(partition.task, ScanTask):
            return read_scan(partition.task, self._options)
        if isinstance(partition.task, StateTask):
            return read_state(source_of(self._options), partition.task, self._options)
        return read(source_of(self._options), partition.task, self._options)


class FilteringReader(BatchReader):
    """A batch reader that accepts filters. A separate class, because Spark checks whether the method exists."""

    def pushFilters(self, filters: list[Any]) -> Iterator[Any]:
        self._pushdown = Pushdown()
        for item in filters:
            # `attribute` is a path; only filters on a column itself, not on a field within it, are used.
            column: tuple[str, ...] = getattr(item, "attribute", ())
            value = getattr(item, "value", None)
            if len(column) == 1 and value is not None:
                self._pushdown.add(column[0], type(item).__name__, value)
            yield item  # Spark applies the filter again


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._plan: StreamPlan | None = None
        self._observers: ObserverGroup | None = None

    def _opened(self) -> StreamPlan:
        if self._plan is None:
            self._plan = StreamPlan(source_of(self._options), self._options)
        return self._plan

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
        return [TaskPartition(task) for task in self._opened().plan(start, end)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, TaskPartition):
            return iter(())
        assert isinstance(partition.task, ReadTask)
        return read(source_of(self._options), partition.task, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        if self._options.group is not None:
            if self._observers is None:
                self._observers = ObserverGroup(self._options.group, partial(client_of, self._options.target))
            self._observers.publish(end)

    def stop(self) -> None:
        if self._observers is not None:
            self._observers.close()
        if self._plan is not None:
            self._plan.close()
