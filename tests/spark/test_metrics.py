"""The listener in a real Spark: the metrics have what a stream has read when it is done."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heapline
from heapline.contract.message import Outgoing
from heapline.spark.metrics import watch
from tests.integration.nats_rig import until
from tests.spark.conftest import MARKS

pytestmark = MARKS


def test_metrics_have_the_progress_of_a_stream(spark: Any, load: Callable[..., Any], tmp_path: Path) -> None:
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0) as hl:
        hl.create_topic("jobs", partitions=2)
        hl.enqueue_batch("jobs", [Outgoing(b"x") for _ in range(300)])
        found = watch(spark, 0)
        try:
            stream = load(stream=True, startingOffsets="earliest", maxOffsetsPerTrigger="200").writeStream
            query = stream.format("noop").queryName("copy").option("checkpointLocation", str(tmp_path / "check"))
            started = query.trigger(availableNow=True).start()
            assert started.awaitTermination(120)
            until(lambda: ("copy", 0.0) in found.readings.of("pipeline_query_active"))
            with urllib.request.urlopen(f"http://127.0.0.1:{found.port}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
        finally:
            found.close()
    assert 'pipeline_rows_read_total{query="copy"} 300.0' in lines
    assert 'pipeline_batches_total{query="copy"} 2.0' in lines
    assert 'pipeline_lag_rows{query="copy"} 0.0' in lines
    assert 'pipeline_query_failures_total{query="copy"} 0.0' in lines
