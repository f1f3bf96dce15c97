"""Jobs report errors before Spark is started, and help names the extra to install."""

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
from heapline.cli.main import app, command_of
from heapline.cli.pipeline import app as pipeline
from heapline.cli.pipeline import job as preflight

if importlib.util.find_spec("pyarrow") is None:
    pytest.skip("reading a journal needs pyarrow", allow_module_level=True)


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(master: str | None) -> Any:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(preflight, "start_spark", started)


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0) as hl:
        hl.create_topic("jobs", partitions=1, segment_bytes=1 << 20, max_payload_bytes=1 << 18)
        yield tmp_path / "data"


def refused(*words: object) -> str:
    printed = CliRunner().invoke(app, ["pipeline", *map(str, words)], env={"COLUMNS": "200"})
    assert printed.exit_code in (1, 2), printed.output
    assert not isinstance(printed.exception, AssertionError), printed.exception
    return str(printed.output)


def test_topic_missing_in_the_directory_is_refused_with_the_existing_ones(data: Path) -> None:
    printed = refused("audit", "--path", data, "--topic", "jobs", "--topic", "orders")
    assert "topic 'orders' does not exist" in printed
    assert "there are jobs" in printed


def test_directory_without_a_queue_is_refused(tmp_path: Path) -> None:
    assert "contains no queue" in refused("report", "--path", tmp_path, "--topic", "jobs")
    assert "does not exist" in refused("report", "--path", tmp_path / "none", "--topic", "jobs")


@pytest.mark.parametrize("words", [["archive", "--lake"], ["lifecycles", "--out"], ["audit", "--opening"]])
def test_file_in_place_of_a_directory_is_refused(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file; choose a directory" in refused(*words, tmp_path / "file", "--topic", "jobs")


def test_unreachable_server_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    printed = refused("archive", "--to", f"127.0.0.1:{port}", "--topic", "jobs", "--lake", "lake", "--timeout", "200ms")
    assert "o server listens" in printed


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["lifecycles"], "--out DIR"),
        (["rebuild"], "--at TIME, or offsets with --offsets"),
        (["archive", "--lake", "l", "--group", "g", "--no-group"], "exclude each other"),
        (["forget", "--key", "k", "--lake-only"], "needs --lake DIR"),
        (["forget", "--key", "k"], "no answer; nothing was changed"),
    ],
)
def test_conflicting_options_are_refused_and_questions_asked_before_spark_starts(words: list[str], why: str) -> None:
    assert why in refused(*words, "--topic", "jobs")


def test_jobs_that_write_take_no_directory() -> None:
    for job in ("load", "replay", "forget"):
        assert "--path " not in CliRunner().invoke(app, ["pipeline", job, "--help"], env={"COLUMNS": "200"}).output


def test_help_names_the_extra_to_install_and_every_job_has_an_example() -> None:
    printed = CliRunner().invoke(app, ["pipeline", "--help"], env={"COLUMNS": "200"}).output
    assert "heapline[spark-local]" in printed
    jobs = command_of(pipeline, "pipeline").list_commands(None)
    assert len(jobs) == 10
    for job in jobs:
        assert "Example:" in CliRunner().invoke(app, ["pipeline", job, "--help"], env={"COLUMNS": "200"}).output, job


def test_topics_read_from_elsewhere_need_not_exist_in_the_queue() -> None:
    assert preflight.needed_topics({"topic": "a", "into": "b"}) == ["a", "b"]
    assert preflight.needed_topics({"topic": "a", "into": "b", "lake": "l"}) == ["b"]
    assert preflight.needed_topics({"topic": "a", "from_path": "d", "into": None}) == ["a"]
    assert preflight.needed_topics({"topic": "a", "lake": "l"}) == []
    assert preflight.needed_topics({"topic": ["a"], "lake": "l", "follow": False}) == ["a"]
    assert preflight.needed_topics({"topic": None}) == []


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow.fs"), "the job needs 'pyarrow'; run pip"),
        (
            type("Py4JJavaError", (Exception,), {"__module__": "py4j.protocol"})(
                "An error occurred while calling o41.save.\n: org.apache.spark.SparkException: Failed: Traceback (most "
                "recent call last):\n  File x\nheapline.errors.TopicFull: topic 'jobs' is full\n\tat a.B.c(D.scala)"
            ),
            "JobFailed: TopicFull: topic 'jobs' is full (set HEAPLINE_TRACEBACK=1 for the complete error)",
        ),
    ],
)
def test_error_of_a_job_is_one_line_without_stacks(
    error: Exception, why: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(master: str | None) -> Any:
        raise error

    monkeypatch.setattr(preflight, "start_spark", fails)
    printed = refused("audit", "--path", data, "--topic", "jobs")
    assert why in printed
    assert len(printed.splitlines()) == 1


def test_log_level_is_set_only_while_java_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEAPLINE_SPARK_LOG", raising=False)
    monkeypatch.delenv("HEAPLINE_TRACEBACK", raising=False)
    with preflight._quiet_java():
        assert os.environ["HEAPLINE_SPARK_LOG"] == "fatal"
    assert "HEAPLINE_SPARK_LOG" not in os.environ
    monkeypatch.setenv("HEAPLINE_SPARK_LOG", "info")
    with preflight._quiet_java():
        assert os.environ["HEAPLINE_SPARK_LOG"] == "info"
    assert os.environ["HEAPLINE_SPARK_LOG"] == "info"
