"""Spark integration: the format `heapline` reads the log and writes to the queue; `session` starts Spark.

    from heapline.spark import session

    spark = session()
    spark.read.format("heapline").option("path", "data").option("subscribe", "orders").load().show()
    df.selectExpr("value", "priority").write.format("heapline").option("topic", "orders").mode("append").save()

Install `heapline[spark]` on a cluster that has Spark; `heapline[spark-local]` includes Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from heapline.spark.session import session

if TYPE_CHECKING:
    from heapline.spark.consumer import ConsumeResult, consume

__all__ = ["ConsumeResult", "consume", "session"]


def __getattr__(name: str) -> Any:
    """Import what only drivers need on first use, because every task imports this package."""
    if name in ("ConsumeResult", "consume"):
        from heapline.spark import consumer

        return getattr(consumer, name)
    raise AttributeError(f"module 'heapline.spark' has no attribute {name!r}")
