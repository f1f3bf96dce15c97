"""What is killed in test_sink_kill.py: a driver that copies topic `in` to others, and archives one of them meanwhile.

At once: a stream to the sink (`out`), a stream whose every batch is written twice (`left` and `right`, each as an own
transaction), and the archive of `out`; or the archive of `in` alone. A few of the tasks throw. It tells of every batch
that is through, and at the end what the audit says, where there is one.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyspark.errors import StreamingQueryException

from heapline.spark import session
from heapline.spark.jobs.archive import archive

Given = dict[str, Any]
TRIES = 20


def main(given: Given) -> int:
    conf = {"spark.sql.execution.arrow.maxRecordsPerBatch": "50"}  # several batches of Arrow in a task
    spark = session(master="local[2,4]", **conf)
    spark.sparkContext.setLogLevel("FATAL")  # of tasks that throw, Spark tells the whole story
    tell(started=True)
    if given["alone"]:
        return archive_alone(spark, given)
    over = threading.Event()
    archiver = threading.Thread(target=follow, args=(spark, given, over))
    archiver.start()
    try:
        with ThreadPoolExecutor() as both:
            list(both.map(lambda name: carry_through(spark, given, name), ("sink", "both")))
    finally:
        over.set()
        archiver.join()
    result = archive(spark, given["where"], "out", given["lake"])
    tell(archived={table.view: sum(table.ends.values()) for table in result.tables})
    tell(verdicts=[audited(spark, given, topic) for topic in ("in", "out", "left", "right")])
    tell(done=True)
    return 0


def archive_alone(spark: Any, given: Given) -> int:
    result = archive(
        spark, given["where"], "in", given["lake"], round_rows=given["round_rows"],
        on_progress=lambda progress: tell(archiving=progress.done),
    )  # fmt: skip
    tell(archived=result.rows, conflicts=result.conflicts, verdicts=[], done=True)
    return 0


def carry_through(spark: Any, given: Given, name: str) -> None:
    """One stream to its end, on its checkpoint: started again if it fails, as a good cluster would do."""
    last = -1
    for _ in range(TRIES):
        query = begin(spark, given, name)
        error = None
        while error is None and query.isActive:
            try:
                query.awaitTermination(0.1)
            except StreamingQueryException as failed:
                error = failed
            for progress in query.recentProgress:
                if progress.batchId > last:
                    last = progress.batchId
                    tell(query=name, batch=last)
        error = error or query.exception()
        if error is None:
            return
        tell(query=name, failed=str(error)[:300])
    raise AssertionError(f"{name} failed {TRIES} times")


def begin(spark: Any, given: Given, name: str) -> Any:
    options = {"subscribe": "in", "columns": "value", "startingOffsets": "earliest", "minPartitions": "2"}
    reader = spark.readStream.format("heapline").options(**given["where"], **options)
    rows = reader.option("maxOffsetsPerTrigger", str(given["batch_rows"])).load()
    df = rows.mapInArrow(throwing(given["throw"], f"{given['seed']}.{given['run']}.{name}"), "value binary")
    if name == "sink":
        writer = df.writeStream.format("heapline").options(**given["where"]).option("topic", "out")
    else:
        writer = df.writeStream.foreachBatch(written_twice(given["where"]))
    writer = writer.option("checkpointLocation", f"{given['checkpoints']}/{name}").trigger(availableNow=True)
    return writer.start()


def written_twice(where: dict[str, str]) -> Callable[[Any, int], None]:
    def write(df: Any, number: int) -> None:
        for topic in ("left", "right"):
            options = {**where, "topic": topic, "txnAppId": f"both-{topic}", "txnVersion": str(number)}
            df.write.format("heapline").options(**options).mode("append").save()

    return write


def throwing(share: float, seed: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Passes everything on; but so many of the tasks throw, before their first rows, among them or after all."""

    def passed(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        rng = random.Random(f"{seed}.{context.taskAttemptId()}")
        fails_at = rng.choice([0, 1, 2, -1]) if rng.random() < share else None
        for number, batch in enumerate(batches):
            if number == fails_at:
                raise RuntimeError("thrown on purpose")
            yield batch
        if fails_at is not None:
            raise RuntimeError("thrown on purpose")

    return passed


def follow(spark: Any, given: Given, over: threading.Event) -> None:
    while not over.is_set():
        try:
            archive(
                spark, given["where"], "out", given["lake"], available_now=False, trigger=0.3,
                round_rows=given["round_rows"], until=over.is_set,
                on_progress=lambda progress: tell(archiving=progress.done),
            )  # fmt: skip
        except Exception as error:  # it begins anew, from where the lake ends
            tell(query="archive", failed=str(error)[:300])
            over.wait(0.5)


def audited(spark: Any, given: Given, topic: str) -> dict[str, Any]:
    if importlib.util.find_spec("heapline.spark.jobs.audit") is None:
        return {"topic": topic, "holds": None}
    from heapline.spark.jobs.audit import audit

    result = audit(spark, given["where"], topic)
    return {"topic": topic, "holds": result.holds, "told": str(result)[:2000]}


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
