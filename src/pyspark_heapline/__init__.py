"""Registers the format `heapline`: Spark imports all top-level packages named pyspark_* and uses their `DefaultSource`.

Spark imports them for every format, and if one import fails, no Python source can be used. So this package needs only
Spark, and reports what else is missing when the format is used. Everything else is in heapline.spark.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource


class DefaultSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "heapline"

    def _source(self) -> Any:
        try:
            from heapline.spark.source import HeaplineSource
        except ImportError as error:
            raise ImportError(
                f"the format 'heapline' needs pyspark 4.2 or newer and `pip install 'heapline[spark]'`: {error}"
            ) from error
        return HeaplineSource(self.options)

    def schema(self) -> Any:
        return self._source().schema()

    def reader(self, schema: Any) -> Any:
        return self._source().reader(schema)

    def streamReader(self, schema: Any) -> Any:
        return self._source().streamReader(schema)

    def writer(self, schema: Any, overwrite: bool) -> Any:
        return self._source().writer(schema, overwrite)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        return self._source().streamWriter(schema, overwrite)


__all__ = ["DefaultSource"]
