"""How Spark finds the format `heapline` by itself: it imports top-level packages called pyspark_* and asks them for
`DefaultSource`. Everything else is in heapline.spark."""

from heapline.spark.source import HeaplineSource as DefaultSource

__all__ = ["DefaultSource"]
