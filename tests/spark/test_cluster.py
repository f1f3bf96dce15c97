"""On a cluster with executors in separate processes: reads and writes are exact if executors are killed."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

import heapline
from heapline.contract.message import Outgoing
from tests.integration.server_process import Process
from tests.spark.conftest import MARKS
from tests.spark.driver_process import Driver, Report

pytestmark = MARKS
ROWS = 6000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Report], Path, Counter[bytes]]]:
    folder = tmp_path_factory.mktemp("cluster")
    data, marks = folder / "data", folder / "marks"
    marks.mkdir()
    with asyncio.Runner() as runner:
        process = Process(data)
        runner.run(process.__aenter__())
        try:
            key_file = data / "admin.key"
            with heapline.connect_sync(process.target, api_key=key_file.read_text().strip()) as hl:
                for topic in ("in", "out"):
                    hl.create_topic(topic, partitions=2)
                for first in range(0, ROWS, 1000):
                    hl.enqueue_batch("in", [Outgoing(b"%d" % i) for i in range(first, first + 1000)])
                server = {"heapline.url": process.target, "heapline.api_key_file": str(key_file)}
                reported = driven(
                    folder, wheres={"path": {"path": str(data)}, "server": server}, marks=str(marks),
                    lake=str(folder / "lake"), checkpoint=str(folder / "checkpoint"),
                )  # fmt: skip
                sent: Counter[bytes] = Counter()
                while messages := hl.pop("out", 1000):
                    sent.update(message.payload for message in messages)
            yield reported, folder, sent
        finally:
            runner.run(process.__aexit__())


def driven(folder: Path, **given: object) -> list[Report]:
    reported: list[Report] = []
    try:
        with Driver("cluster_driver.py", folder / "log", **given) as driver:
            reported.extend(driver.reported())
            assert driver.ended() == 0, driver.everything()[-4000:]
    finally:
        for app in (found["app"] for found in reported if "app" in found):  # what the executor's workers leave behind
            shutil.rmtree(Path(pyspark.__file__).parent / "work" / app, ignore_errors=True)
    return reported


Found = tuple[list[Report], Path, Counter[bytes]]


@pytest.mark.parametrize("way", ["path", "server"])
def test_read_returns_each_row_once_if_an_executor_is_killed(run: Found, way: str) -> None:
    [found] = [reported["rows"] for reported in run[0] if reported.get("read") == way]
    assert found == list(range(ROWS))


def test_stream_is_written_once_if_an_executor_is_killed(run: Found) -> None:
    assert run[2] == Counter(b"%d" % i for i in range(ROWS))


def test_archive_has_each_row_once_if_an_executor_is_killed(run: Found) -> None:
    from deltalake import DeltaTable

    table = DeltaTable(str(run[1] / "lake" / "messages")).to_pyarrow_table(columns=["value"])
    assert sorted(int(value) for value in table.column("value").to_pylist()) == list(range(ROWS))


def test_executors_were_killed(run: Found) -> None:
    [killed] = [reported["killed"] for reported in run[0] if "killed" in reported]
    assert killed == ["archive", "read from path", "read from server", "write"]
