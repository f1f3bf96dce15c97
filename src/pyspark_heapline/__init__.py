"""How Spark finds the format `heapline` by itself: it imports all top-level packages called pyspark_* and asks each for
a `DefaultSource`.

It does so whatever format is asked for, and if one of them cannot be imported, no Python source can be used at all. So
this one needs nothing but Spark, and only who uses it is told what else is missing. All the rest is in heapline.spark.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource


class DefaultSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "heapline"

    def _made(self) -> Any:
        try:
            from heapline.spark.source import HeaplineSource
        except ImportError as error:
            raise ImportError(
                f"the format 'heapline' needs pyspark 4.2 or newer and `pip install 'heapline[spark]'`: {error}"
            ) from error
        return HeaplineSource(self.options)

    def schema(self) -> Any:
        return self._made().schema()

    def reader(self, schema: Any) -> Any:
        return self._made().reader(schema)

    def streamReader(self, schema: Any) -> Any:
        return self._made().streamReader(schema)

    def writer(self, schema: Any, overwrite: bool) -> Any:
        return self._made().writer(schema, overwrite)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        return self._made().streamWriter(schema, overwrite)


__all__ = ["DefaultSource"]
