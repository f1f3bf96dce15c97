"""One Spark session for all tests of a process, because starting one takes as long as most tests together.

Every module sets `pytestmark = MARKS`, so that all tests go to one process of a parallel run. Without pyspark or a Java
the tests are skipped.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("pyspark") else ["test_*.py"]
MARKS = [pytest.mark.spark, pytest.mark.slow, pytest.mark.xdist_group("spark")]


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from heapline.spark import session
    from heapline.spark.session import NoJava

    try:
        found = session(master="local[2,4]", app="heapline-tests")
    except NoJava as error:
        pytest.skip(str(error))
    yield found
    found.stop()


@pytest.fixture
def load(spark: Any, tmp_path: Path) -> Callable[..., Any]:
    """`load(**options)`: a DataFrame of topic "jobs" in the test's data directory."""

    def loaded(stream: bool = False, **options: str) -> Any:
        reader = (spark.readStream if stream else spark.read).format("heapline").option("path", str(tmp_path / "data"))
        return reader.options(**{"subscribe": "jobs", **options}).load()

    return loaded
