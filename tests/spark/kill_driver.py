"""The driver that test_sink_kill.py kills: it copies topic `in` to others and archives one of them.

At the same time it runs a stream to the sink (`out`), a stream whose every batch is written twice (`left` and `right`,
each as its own transaction), and the archive of `out`; or only the archive of `in`. Some tasks throw. It reports every
completed batch, and at the end the result of the audit.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from heapline.spark import session
from heapline.spark.audit.job import audit
from heapline.spark.jobs.archive import archive

Given = dict[str, Any]
TRIES = 20


def main(given: Given) -> int:
    conf = {"spark.sql.execution.arrow.maxRecordsPerBatch": "50"}  # several batches of Arrow in a task
    spark = session(master="local[2,4]", **conf)
    spark.sparkContext.setLogLevel("FATAL")  # if tasks throw, Spark logs the whole story
    tell(started=True)
    if given["alone"]:
        return archive_alone(spark, given)
    over = threading.Event()
    archiver = threading.Thread(target=follow, args=(spark, given, over))
    archiver.start()
    try:
        carry_through(spark, given, ["sink", "both"])
    finally:
        over.set()
        archiver.join()
    result = archive(spark, given["where"], "out", given["lake"])
    tell(archived={table.view: sum(table.ends.values()) for table in result.tables})
    tell(audit=audited(spark, given), done=True)
    return 0


def archive_alone(spark: Any, given: Given) -> int:
    result = archive(
        spark, given["where"], "in", given["lake"], round_rows=given["round_rows"],
        on_progress=lambda progress: tell(archiving=progress.done),
    )  # fmt: skip
    tell(archived=result.rows, conflicts=result.conflicts, done=True)
    return 0


def carry_through(spark: Any, given: Given, names: list[str]) -> None:
    """Run streams to their ends, each on its checkpoint, and restart those that fail, as a cluster would. In
    this thread: Spark finds a stream's sink by the session of the thread that starts it."""
    running = {name: Running(spark, given, name) for name in names}
    while running:
        for name, each in list(running.items()):
            if each.is_over():
                del running[name]
        time.sleep(0.05)


class Running:
    def __init__(self, spark: Any, given: Given, name: str) -> None:
        self._begin = lambda: begin(spark, given, name)
        self._name, self._query, self._tries, self._reported = name, None, 0, -1
        self._over = False

    def is_over(self) -> bool:
        try:
            if self._query is None:
                self._tries += 1
                self._query = self._begin()
            if not self._over:
                self._reported = tell_batches(self._query, self._name, self._reported)
                self._over = bool(self._query.awaitTermination(0.05))
        except Exception as error:  # even a failed start: Spark gives a worker ten seconds
            tell(query=self._name, failed=str(error)[:300])
            self._query = None
            if self._tries == TRIES:
                raise
        return self._over


def tell_batches(query: Any, name: str, reported: int) -> int:
    for progress in query.recentProgress:
        if progress.batchId > reported:
            reported = progress.batchId
            tell(query=name, batch=reported)
    return reported


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
            options = {**where, "topic": topic, "txnAppId": "both", "txnVersion": str(number)}
            df.write.format("heapline").options(**options).mode("append").save()

    return write


def throwing(share: float, seed: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Passes everything on; but some of the tasks throw, before their first rows, among them or after all."""

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
        except Exception as error:  # it restarts where the lake ends
            tell(query="archive", failed=str(error)[:300])
            over.wait(0.5)


def audited(spark: Any, given: Given) -> dict[str, Any]:
    """Return what the queue's own audit reports for all four topics."""
    result = audit(spark, given["where"], ("in", "out", "left", "right"))
    reported = {check.name: check.verdict for check in result.checks}
    return {"refuted": list(result.refuted), "messages": result.messages, "checks": reported, "events": result.events}


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
