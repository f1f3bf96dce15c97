"""Spark reads the log: the format `heapline`, and a session that just works.

    from heapline.spark import session

    spark = session()
    spark.read.format("heapline").option("path", "data").option("subscribe", "orders").load().show()

`heapline[spark]` is the connector for a cluster that has Spark; `heapline[spark-local]` brings Spark too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from heapline.spark.session import session

if TYPE_CHECKING:
    from heapline.spark.consuming import ConsumeResult, consume

__all__ = ["ConsumeResult", "consume", "session"]


def __getattr__(name: str) -> Any:
    """Workers import this package with every task: what only drivers need comes when it is asked for."""
    if name in ("ConsumeResult", "consume"):
        from heapline.spark import consuming

        return getattr(consuming, name)
    raise AttributeError(f"module 'heapline.spark' has no attribute {name!r}")
