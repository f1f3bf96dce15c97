"""A Spark session that just works on one machine: the right Python, a Java, loopback, little noise.

Whatever is given, in Spark's own names, goes before what is set here; on a cluster nothing is needed but the format.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from heapline.spark.java import find_java_home

MASTER = "local[2]"
#: What differs from Spark's own defaults, and why.
CONF = {
    "spark.ui.enabled": "false",  # a port less, and nobody looks
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",  # reachable by this machine alone
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",  # 200 tasks for a few rows take seconds
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
_QUIET = """rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex
"""


def session(*, master: str | None = None, app: str = "heapline", quiet: bool = True, **conf: Any) -> Any:
    """The running session, or a new one. Keywords are Spark's settings, with `__` or `_` for dots where Python wants
    a name: `spark_driver_memory="2g"`; names with dots go as `**{"spark.driver.memory": "2g"}`.
    """
    settings = CONF | {_setting(name): str(value) for name, value in conf.items()}
    _prepare(quiet)
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise ImportError("pyspark is not here: install it with `pip install 'heapline[spark-local]'`") from None
    builder = SparkSession.builder.appName(app)
    if SparkSession.getActiveSession() is None:
        builder = builder.master(master or os.environ.get("SPARK_MASTER") or MASTER)
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _setting(name: str) -> str:
    return name if "." in name else name.replace("__", ".").replace("_", ".")


def _prepare(quiet: bool) -> None:
    """What Spark reads from the environment, before its Java starts. What is set already stays."""
    # Spark would start whatever `python3` is on PATH, which need not have Heapline.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if (home := find_java_home()) is not None:
        os.environ["JAVA_HOME"] = home
    if quiet and "SPARK_CONF_DIR" not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="heapline-spark-"))
        (folder / "log4j2.properties").write_text(_QUIET)
        os.environ["SPARK_CONF_DIR"] = str(folder)
