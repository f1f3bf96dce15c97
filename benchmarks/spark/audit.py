"""The speed of the audit: messages that are sent, popped and acked, some of them nacked, in four partitions.

The complete `audit` is timed, after one warm-up run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import heapline
from benchmarks.engine import figure
from heapline.contract.message import Outgoing

TARGET = 200_000
PARTITIONS = 4
BATCH = 1000


def run(quick: bool, directory: Path) -> Iterator[dict[str, Any]]:
    from heapline.spark import session
    from heapline.spark.audit.job import audit

    data = directory.resolve() / "audited"
    fill(data, 500_000 if quick else 5_000_000)
    spark = session(master="local[2]", spark_driver_memory="2g")
    try:
        found = [audit(spark, {"path": str(data)}, "orders") for _ in range(2)][-1]
    finally:
        spark.stop()
    if found.is_refuted:
        raise RuntimeError(f"the audit refutes {found.refuted}")
    value = found.events / found.seconds
    yield figure(
        f"audit, {found.events} events on local[2]", value, "events/s", None, None, f"≥ {TARGET}", value >= TARGET
    )


def fill(path: Path, events: int) -> None:
    """Create about this many events: a message has three, and five if it is nacked once."""
    with heapline.open_sync(path) as hl:
        hl.create_topic("orders", partitions=PARTITIONS)
        for _ in range(events // (BATCH * 16 // 5)):
            hl.enqueue_batch("orders", [Outgoing(b"x" * 20, i % 10, key=f"k{i % 97}") for i in range(BATCH)])
            got = hl.pop("orders", BATCH)
            hl.nack(got[: BATCH // 10], backoff=0)
            hl.ack(got[BATCH // 10 :])
