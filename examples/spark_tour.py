"""A day in a shop, on Spark: `python examples/spark_tour.py`. Takes half a minute.

Needs `heapline[server,spark-local]`. Orders stream in from files, exactly once. Workers process them, and some fail.
The archive copies the log to a lake. The report is an HTML page, the forecast says how many workers are needed, and the
audit proves from the log that no message was lost, leased to two workers or delivered early. Starts a server on ./data,
unless HEAPLINE_URL names one.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import heapline
from heapline.spark import session
from heapline.spark.audit.job import audit
from heapline.spark.jobs.archive import archive
from heapline.spark.jobs.forecast import forecast
from heapline.spark.jobs.lake import lake
from heapline.spark.jobs.report import report
from heapline.spark.jobs.report_page import report_page

TOPIC = "orders"
ORDERS = 600


@contextmanager
def server() -> Iterator[dict[str, str]]:
    """Return the location of the queue, as options of the format `heapline`."""
    if "HEAPLINE_URL" in os.environ:
        yield {"heapline.url": os.environ["HEAPLINE_URL"]}  # and the key as the environment says
        return
    command = [
        sys.executable,
        "-m",
        "heapline",
        "serve",
        "--data",
        "data",
        "--port",
        "0",
        "--grpc-port",
        "0",
        "--http-port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            port = re.search(r"Heapline on port (\d+)", process.stdout.readline())
            assert port is not None, "the server did not start"
            yield {
                "heapline.url": f"localhost:{port[1]}",
                "heapline.api_key_file": str(Path("data/admin.key").resolve()),
            }
        finally:
            process.terminate()


def orders_arrive(spark, where: dict[str, str]) -> None:
    """Files of orders, as a stream, into the topic. Run twice: what was written is not written again."""
    Path("incoming").mkdir(exist_ok=True)
    for shop in range(3):
        rows = [{"order": n, "shop": f"shop-{shop}", "urgent": n % 10 == 0} for n in range(shop, ORDERS, 3)]
        Path(f"incoming/shop-{shop}.json").write_text("\n".join(map(json.dumps, rows)))
    for _ in range(2):
        incoming = spark.readStream.schema("order BIGINT, shop STRING, urgent BOOLEAN").json("incoming")
        messages = incoming.selectExpr("to_json(struct(*)) AS value", "shop AS key", "if(urgent, 0, 5) AS priority")
        stream = messages.writeStream.format("heapline").options(**where).option("topic", TOPIC)
        query = stream.option("checkpointLocation", "checkpoint").trigger(availableNow=True).start()
        query.awaitTermination()


def work_is_done(hl) -> None:
    """One in fifty orders cannot be filled, however often it is tried; the last twenty are left for tomorrow."""
    done = failed = 0
    while done + failed // 2 < ORDERS - 20:
        for message in hl.pop(TOPIC, min(20, ORDERS - 20 - done - failed // 2), wait=5.0):
            if json.loads(message.payload)["order"] % 50 == 0:
                hl.nack(message, backoff=0.0, reason="no stock")
                failed += 1
            else:
                hl.ack(message)
                done += 1


def main() -> None:
    spark = session(app="tour")
    with server() as where, heapline.connect_sync(where["heapline.url"]) as hl:
        hl.create_topic(TOPIC, partitions=2, max_retries_default=1)
        orders_arrive(spark, where)
        work_is_done(hl)

        kept = archive(spark, where, TOPIC, "lake")
        print("archived:", {table.view: table.rows > 0 for table in kept.tables})
        print("messages in the lake:", lake(spark, "lake", topic=TOPIC).count())

        found = report(spark, where, TOPIC, lake="lake")
        Path("report.html").write_text(report_page(found), encoding="utf-8")
        print("outcomes:", {counted.what: counted.messages for counted in found.outcomes})
        print("dead letters:", {counted.what: counted.messages for counted in found.dead_reasons})

        ahead = forecast(spark, where, TOPIC, lake="lake", goal=60.0)
        print("workers for a wait of a minute:", ahead.workers_needed)

        verdict = audit(spark, where, TOPIC)
        print("audit:", "refuted" if verdict.is_refuted else "passed,", verdict.messages, "messages")
    spark.stop()


if __name__ == "__main__":
    main()
