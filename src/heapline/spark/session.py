"""A Spark session that just works on one machine: the right Python, a Java, loopback, little noise.

Whatever is given, in Spark's own names, goes before what is set here. Where somebody else starts Spark (spark-submit, a
notebook with a session, Spark Connect) nothing is set here but what is given: a job must run where it was sent.
"""

from __future__ import annotations

import os
import sys
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
    "spark.sql.python.filterPushdown.enabled": "true",  # what `pushdown=true` needs
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
#: Of these, one is set where Spark was started, or is to be reached, by somebody else.
_STARTED_ELSEWHERE = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE")


def session(*, master: str | None = None, app: str = "heapline", quiet: bool = True, **conf: Any) -> Any:
    """The running session, or a new one. Keywords are Spark's settings with `_` for dots, `spark_driver_memory="2g"`,
    or as they are: `**{"spark.driver.memory": "2g"}`.
    """
    given = {setting_name(name): str(value) for name, value in conf.items()}
    ours = not any(name in os.environ for name in _STARTED_ELSEWHERE)
    if ours:
        _prepare(quiet)
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise ImportError("pyspark is not here: install it with `pip install 'heapline[spark-local]'`") from None
    builder = SparkSession.builder.appName(app)
    if ours and SparkSession.getActiveSession() is None:
        builder = builder.master(master or MASTER)
        given = CONF | given
    elif master is not None:
        raise ValueError(f"master={master!r}: Spark runs already, or is started by somebody else, who chose one")
    for name, value in given.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def setting_name(name: str) -> str:
    """
    >>> setting_name("spark_driver_memory"), setting_name("spark.sql.shuffle.partitions")
    ('spark.driver.memory', 'spark.sql.shuffle.partitions')
    """
    return name if "." in name else name.replace("_", ".")


def _prepare(quiet: bool) -> None:
    """What Spark reads from the environment, before its Java starts. What is set already stays."""
    # Spark would start whatever `python3` is on PATH, which need not have Heapline.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if (home := find_java_home()) is not None:
        os.environ["JAVA_HOME"] = home
    if quiet:
        os.environ.setdefault("SPARK_CONF_DIR", str(Path(__file__).parent / "quiet"))
