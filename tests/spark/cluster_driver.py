"""Reads, writes and archives on executors in separate processes, one of which is killed during each.

Run by test_cluster.py. The task that kills its executor does so once, after it has passed on rows.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from heapline.spark import session
from heapline.spark.jobs.archive import archive

Given = dict[str, Any]


def main(given: Given) -> None:
    spark = session(master="local-cluster[2,1,1024]", **{"spark.sql.execution.arrow.maxRecordsPerBatch": "500"})
    spark.sparkContext.setLogLevel("FATAL")
    tell(app=spark.sparkContext.applicationId)
    marks = Path(given["marks"])
    for name, where in given["wheres"].items():
        df = spark.read.format("heapline").options(**where, subscribe="in", columns="value", minPartitions="4").load()
        rows = df.mapInArrow(killing(marks / f"read from {name}"), "value binary")
        tell(read=name, rows=sorted(int(row.value) for row in rows.collect()))
    stream(spark, given, marks / "write")
    killer = threading.Thread(target=kill_any, args=(marks / "archive", Path(given["lake"])))
    killer.start()
    result = archive(spark, given["wheres"]["server"], "in", given["lake"], round_rows=2000)
    killer.join()
    tell(archived=result.rows, killed=sorted(path.name for path in marks.iterdir()))
    spark.stop()
    tell(done=True)


def stream(spark: Any, given: Given, mark: Path) -> None:
    where = given["wheres"]["server"]
    options = {"subscribe": "in", "columns": "value", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "3000"}
    rows = spark.readStream.format("heapline").options(**where, **options, minPartitions="2").load()
    writer = rows.mapInArrow(killing(mark), "value binary").writeStream.format("heapline").options(**where)
    writer = writer.option("topic", "out").option("checkpointLocation", given["checkpoint"])
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    tell(written=sum(progress.numInputRows for progress in query.recentProgress))


def killing(mark: Path) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Passes everything on; the first task that reaches its second batch kills the executor under it, once."""
    path = str(mark)

    def passed(batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number == 1 and first(path):
                kill(executor_of(os.getpid()))
            yield batch

    def first(path: str) -> bool:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    return passed


def executor_of(pid: int) -> int:
    """The Java above a Python worker: its daemon is between them."""
    while "java" not in Path(f"/proc/{pid}/comm").read_text():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_any(mark: Path, lake: Path) -> None:
    """Return an executor, as soon as the lake has a file of rows."""
    while not list(lake.rglob("*.parquet")):
        time.sleep(0.02)
    executors = [pid for pid in javas() if b"CoarseGrainedExecutorBackend" in command(pid)]
    kill(executors[0])
    mark.touch()


def javas() -> list[int]:
    """The processes of this session."""
    mine, found = os.getsid(0), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == mine and (entry / "comm").read_text().strip() == "java":
                    found.append(int(entry.name))
            except (OSError, ProcessLookupError):
                continue
    return found


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
