"""The events of a journal, packed where they are read: a data source of the audit's own, for the driver to register.

Takes the options of the format `heapline`, and gives the rows of packing.py instead of the view's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from heapline.spark.jobs.auditing.packing import PACKED_DDL, pack
from heapline.spark.options import parse_options
from heapline.spark.source import BatchReader, HeaplineSource
from heapline.spark.sources import settled


class PackedEvents(HeaplineSource):
    @classmethod
    def name(cls) -> str:
        return "heapline_packed_events"

    def schema(self) -> str:
        return PACKED_DDL

    def reader(self, schema: Any) -> DataSourceReader:
        return PackingReader(settled(parse_options(self.options, streaming=False)))


class PackingReader(BatchReader):
    def read(self, partition: InputPartition) -> Iterator[Any]:
        return pack(super().read(partition))
