"""What keeps a job from working is said before Spark is started; and help says what to install."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import heapline
from heapline.cli.main import app
from heapline.cli.pipeline import JOBS, looking, sharing

if importlib.util.find_spec("pyarrow") is None:
    pytest.skip("reading a journal needs pyarrow", allow_module_level=True)


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(master: str | None) -> Any:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(sharing, "_session", started)
    monkeypatch.setattr(looking, "TIMEOUT", 0.2)


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0) as hl:
        hl.create_topic("jobs", partitions=1, segment_bytes=1 << 20, max_payload_bytes=1 << 18)
        yield tmp_path / "data"


def refused(*words: object) -> str:
    told = CliRunner().invoke(app, ["pipeline", *map(str, words)], env={"COLUMNS": "200"})
    assert told.exit_code in (1, 2), told.output
    assert not isinstance(told.exception, AssertionError), told.exception
    return str(told.output)


def test_topic_that_is_not_in_the_directory_is_told_with_those_that_are(data: Path) -> None:
    told = refused("audit", "--path", data, "--topic", "jobs", "--topic", "orders")
    assert "no topic 'orders'" in told
    assert "there are jobs" in told


def test_directory_without_a_queue_is_told(tmp_path: Path) -> None:
    assert "holds no queue" in refused("report", "--path", tmp_path, "--topic", "jobs")
    assert "is no directory" in refused("report", "--path", tmp_path / "none", "--topic", "jobs")


@pytest.mark.parametrize("words", [["archive", "--lake"], ["lifecycles", "--out"], ["audit", "--opening"]])
def test_file_in_place_of_a_directory_is_told(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file, and no directory" in refused(*words, tmp_path / "file", "--topic", "jobs")


def test_server_that_is_not_there_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    told = refused("archive", "--to", f"127.0.0.1:{port}", "--topic", "jobs", "--lake", "lake")
    assert "obody listens" in told


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["lifecycles"], "--out DIR"),
        (["rebuild"], "--at WHEN or --offsets"),
        (["archive", "--lake", "l", "--group", "g", "--no-group"], "exclude each other"),
        (["forget", "--key", "k", "--lake-only"], "goes with --lake"),
        (["forget", "--key", "k"], "nobody answered"),
    ],
)
def test_options_that_do_not_go_together_are_refused_and_questions_asked_at_once(words: list[str], why: str) -> None:
    assert why in refused(*words, "--topic", "jobs")


def test_jobs_that_write_take_no_directory() -> None:
    for job in ("load", "replay", "forget"):
        assert "--path " not in CliRunner().invoke(app, ["pipeline", job, "--help"], env={"COLUMNS": "200"}).output


def test_help_names_the_extra_to_install_and_every_job_has_an_example() -> None:
    told = CliRunner().invoke(app, ["pipeline", "--help"], env={"COLUMNS": "200"}).output
    assert "heapline[spark-local]" in told
    for job in JOBS:
        assert "Example:" in CliRunner().invoke(app, ["pipeline", job, "--help"], env={"COLUMNS": "200"}).output, job


def test_what_is_read_from_elsewhere_need_not_be_where_the_queue_is() -> None:
    assert looking.needed_topics({"topic": "a", "into": "b"}) == ["a", "b"]
    assert looking.needed_topics({"topic": "a", "into": "b", "lake": "l"}) == ["b"]
    assert looking.needed_topics({"topic": "a", "from_path": "d", "into": None}) == ["a"]
    assert looking.needed_topics({"topic": "a", "lake": "l"}) == []
    assert looking.needed_topics({"topic": ["a"], "lake": "l", "follow": False}) == ["a"]
    assert looking.needed_topics({"topic": None}) == []


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow.fs"), "jobs need 'pyarrow': run pip install"),
        (
            type("Py4JJavaError", (Exception,), {"__module__": "py4j.protocol"})(
                "An error occurred while calling o41.save.\n: org.apache.spark.SparkException: Failed: Traceback (most "
                "recent call last):\n  File x\nheapline.errors.TopicFull: topic 'jobs' is full\n\tat a.B.c(D.scala)"
            ),
            "JobFailed: TopicFull: topic 'jobs' is full (all of it: HEAPLINE_TRACEBACK=1)",
        ),
    ],
)
def test_what_a_job_died_of_is_told_in_a_line_without_stacks(
    error: Exception, why: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(master: str | None) -> Any:
        raise error

    monkeypatch.setattr(sharing, "_session", fails)
    told = refused("audit", "--path", data, "--topic", "jobs")
    assert why in told
    assert len(told.splitlines()) == 1


def test_log_level_is_set_for_the_java_that_is_started_and_for_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEAPLINE_SPARK_LOG", raising=False)
    monkeypatch.delenv("HEAPLINE_TRACEBACK", raising=False)
    with sharing._quiet_java():
        assert os.environ["HEAPLINE_SPARK_LOG"] == "fatal"
    assert "HEAPLINE_SPARK_LOG" not in os.environ
    monkeypatch.setenv("HEAPLINE_SPARK_LOG", "info")
    with sharing._quiet_java():
        assert os.environ["HEAPLINE_SPARK_LOG"] == "info"
    assert os.environ["HEAPLINE_SPARK_LOG"] == "info"
