"""Reads a topic with every way to pass a key, in a session with an event log, and reports the results.

Run by test_own_session.py in a separate process, because Java and the event log are chosen when Spark starts.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heapline.spark import session


def main(given: dict[str, Any]) -> None:
    events, key_file = given["events"], given["key_file"]
    spark = session(
        master="local[1]",
        **{"spark.eventLog.enabled": "true", "spark.eventLog.dir": events, "spark.eventLog.compress": "false"},
    )
    version = spark.sparkContext._jvm.System.getProperty("java.home")
    tell(java=version, home=os.environ.get("JAVA_HOME"))
    tell(way="path", rows=spark.read.format("heapline").options(path=given["data"], subscribe="jobs").load().count())
    key = Path(key_file).read_text().strip()
    ways: dict[str, dict[str, str]] = {
        "file": {"heapline.api_key_file": key_file}, "token": {"heapline.token": key}, "environment": {},
    }  # fmt: skip
    for way, options in ways.items():
        options = {"heapline.url": given["url"], "subscribe": "jobs", **options}
        df = spark.read.format("heapline").options(**options).load()
        tell(way=way, rows=patiently(df.count), plan=explained(df), streamed=streamed(spark, options))
        failing = spark.read.format("heapline").options(**options).option("startingOffsets", '{"jobs": {"0": 9999}}')
        lost = spark.read.format("heapline").options(**{**options, "subscribe": "nowhere"})
        reported = [failure_of(failing.load), failure_of(lost.load)]
        if way == "token":  # a key that the server does not have is also a credential
            strange = {**options, "heapline.token": given["strange"]}
            reported.append(failure_of(spark.read.format("heapline").options(**strange).load))
        tell(way=way, failures=reported)
    spark.stop()
    tell(done=True)


def explained(df: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as reported:
        df.explain(True)
    return reported.getvalue()


def streamed(spark: Any, options: dict[str, str]) -> str:
    """Return the progress of a stream, which all users of the session can see."""
    df = spark.readStream.format("heapline").options(**options).option("startingOffsets", "earliest").load()
    with tempfile.TemporaryDirectory() as checkpoint:
        writing = df.writeStream.format("noop").option("checkpointLocation", checkpoint).trigger(availableNow=True)
        query = patiently(lambda: ended(writing.start()))
        files = [path.read_text(errors="replace") for path in Path(checkpoint).rglob("*") if path.is_file()]
    return "\n".join([str([p.json for p in query.recentProgress]), str(query.status), query.explain() or "", *files])


def ended(query: Any) -> Any:
    query.awaitTermination()
    return query


def patiently(act: Callable[[], Any]) -> Any:
    """Spark gives a worker ten seconds to start, which is little on a busy shared machine."""
    for _ in range(5):
        try:
            return act()
        except Exception as error:
            if "connect back" not in str(error):
                raise
    return act()


def failure_of(load: Any) -> str:
    try:
        patiently(lambda: load().collect())
    except Exception as error:
        chain, seen = [], error
        while seen is not None:
            chain += [repr(seen), str(seen)]
            seen = seen.__cause__ or seen.__context__
        return "\n".join(chain)
    raise AssertionError("this read must fail")


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
