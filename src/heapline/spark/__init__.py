"""Spark reads the log and writes to the queue: the format `heapline`, and a session that just works.

    from heapline.spark import session

    spark = session()
    spark.read.format("heapline").option("path", "data").option("subscribe", "orders").load().show()
    df.selectExpr("value", "priority").write.format("heapline").option("topic", "orders").mode("append").save()

`heapline[spark]` is the connector for a cluster that has Spark; `heapline[spark-local]` brings Spark too.
"""

from __future__ import annotations

from heapline.spark.session import session

__all__ = ["session"]
