"""`heapline pipeline archive` and `heapline pipeline lake`, with a fake Spark that runs tasks in this process."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import heapline
from heapline.cli.main import app

if importlib.util.find_spec("deltalake") is None or importlib.util.find_spec("pyarrow") is None:
    pytest.skip("the lake needs deltalake and pyarrow", allow_module_level=True)

from heapline.cli.pipeline import job
from tests.unit.spark.lake_rig import TasksAtOnce, fill


@pytest.fixture
def hl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(job, "start_spark", lambda master: TasksAtOnce())
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0) as broker:
        broker.create_topic("jobs", partitions=2, segment_bytes=1 << 20, max_payload_bytes=1 << 18)
        fill(broker, 100)
        yield broker


def run(*arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["pipeline", *map(str, arguments)], env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.output


def test_archive_prints_a_table_or_json_and_lake_show_lists_its_rows(hl: Any, tmp_path: Path) -> None:
    where = ("--path", tmp_path / "data", "--topic", "jobs", "--lake", tmp_path / "lake")
    printed = run("archive", *where)
    assert "events" in printed
    assert "100" in printed
    assert "only the topic's retention keeps its rows" in printed
    again = json.loads(run("archive", *where, "--no-group", "--json"))
    assert (again["commits"], again["group"]) == (0, None)
    shown = json.loads(run("lake", "show", "--lake", tmp_path / "lake", "--json"))
    assert [(topic["topic"], topic["view"], topic["rows"]) for topic in shown] == [
        ("jobs", "events", 100), ("jobs", "messages", 100),
    ]  # fmt: skip
    assert "ends at" in run("lake", "show", "--lake", tmp_path / "lake")


def test_lake_is_maintained_and_a_topic_dropped(hl: Any, tmp_path: Path) -> None:
    lake = ("--lake", tmp_path / "lake")
    for _ in range(2):
        run("archive", "--path", tmp_path / "data", "--topic", "jobs", "--view", "messages", *lake)
        fill(hl, 50)
    done = json.loads(run("lake", "maintain", *lake, "--keep", "400d", "--json"))
    assert [(d["view"], d["files_before"], d["files"], d["rows_dropped"]) for d in done] == [("messages", 2, 1, 0)]
    assert "files now" in run("lake", "maintain", *lake)
    assert "150 rows removed from the lake" in run("lake", "drop", *lake, "--topic", "jobs", "--yes")


def test_bad_lake_options_are_refused(hl: Any, tmp_path: Path) -> None:
    lake = ("--lake", tmp_path / "lake")
    assert "no lake exists at" in run("lake", "show", *lake, code=1)
    assert "must be a day or more" in run("lake", "maintain", *lake, "--keep", "5m", code=1)
    assert "no topics selected" in run("archive", "--path", tmp_path / "data", *lake, code=1)
