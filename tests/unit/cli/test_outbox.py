"""`heapline outbox`: tables, relay and status from the command line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from typer.testing import CliRunner

import heapline
from heapline import outbox
from heapline.cli.main import app
from heapline.outbox.sender import IN_DOUBT
from heapline.outbox.sql import OUTBOX

ROOT = Path(__file__).parents[3]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/app.db"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0) as hl:
        hl.create_topic("jobs", segment_bytes=1 << 20, max_payload_bytes=10)
    return tmp_path / "data"


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["outbox", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["outbox", *map(str, arguments)])
    assert result.exit_code != 0
    return result.output


def write(url: str, *payloads: bytes) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        for payload in payloads:
            outbox.enqueue(connection, "jobs", payload)
    engine.dispose()


def test_relay_once_sends_waiting_rows_and_status_shows_refused_ones(url: str, data: Path) -> None:
    assert "exist" in run("init", "--database", url)
    assert "exist" in run("init", "--database", url)
    write(url, b"1", b"2", bytes(11))
    assert run("status", "--database", url) == "waiting: 3\n"
    assert "2 messages relayed" in run("relay", "--database", url, "--data", data, "--once")
    printed = run("status", "--database", url)
    assert printed.startswith("refused: 1\nrow 3 for jobs: PayloadTooLarge")
    with heapline.open_sync(data, spare_segment_bytes=0) as hl:
        assert sorted(m.payload for m in hl.pop("jobs", 10)) == [b"1", b"2"]


def test_all_commands_take_the_url_of_an_async_driver(url: str, data: Path) -> None:
    asynchronous = url.replace("sqlite:", "sqlite+aiosqlite:")
    assert "exist" in run("init", "--database", asynchronous)
    assert run("status", "--database", asynchronous) == "no rows are waiting\n"
    write(url, b"1", bytes(11))
    assert "1 message relayed" in run("relay", "--database", asynchronous, "--data", data, "--once")
    assert run("status", "--database", asynchronous).startswith("refused: 1\n")
    printed = run("retry", "--database", asynchronous, "--all", "--topic", "default/jobs")
    assert printed == "1 row will be sent again\n"


def test_relay_refuses_bad_options_with_advice(url: str, data: Path) -> None:
    assert "the key file cannot be read" in refused("relay", "--database", url, "--key-file", "no such file")
    both = refused("relay", "--database", url, "--data", data, "--to", "localhost:7400")
    assert "not both" in both
    assert "--database" in refused("relay")


def test_refused_rows_are_sent_again_after_retry(url: str, data: Path) -> None:
    run("init", "--database", url)
    write(url, bytes(11), bytes(12))
    assert "0 messages relayed" in run("relay", "--database", url, "--data", data, "--once")
    with heapline.open_sync(data, spare_segment_bytes=0) as hl:
        hl.update_topic("jobs", max_payload_bytes=100)
    assert "0 messages relayed" in run("relay", "--database", url, "--data", data, "--once"), "not without retry"
    assert "0 rows" in run("retry", "--database", url, "--all", "--topic", "other")
    assert "1 row will" in run("retry", "--database", url, "2")
    assert "1 message relayed" in run("relay", "--database", url, "--data", data, "--once")
    assert "1 row will" in run("retry", "--database", url, "--all")
    assert "0 rows" in run("retry", "--database", url, "1"), "it is no longer refused"
    assert "1 message relayed" in run("relay", "--database", url, "--data", data, "--once")
    assert run("status", "--database", url) == "no rows are waiting\n"


def test_row_that_may_be_enqueued_is_sent_again_only_by_id(url: str) -> None:
    run("init", "--database", url)
    write(url, b"1", b"2")
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(OUTBOX.update().values(failed_ms=1, error=IN_DOUBT))
    assert "0 rows" in run("retry", "--database", url, "--all")
    assert "1 row will" in run("retry", "--database", url, "2")
    assert run("status", "--database", url).startswith("refused: 1\nwaiting: 1\n")
    engine.dispose()


def test_retry_needs_rows_or_all(url: str) -> None:
    run("init", "--database", url)
    for which in ([], ["1", "--all"]):
        assert "select rows by their ids" in refused("retry", "--database", url, *which)


def test_relay_ends_on_sigterm_and_releases_its_lane(url: str, data: Path) -> None:
    run("init", "--database", url)
    write(url, b"1")
    command = [sys.executable, "-m", "heapline", "outbox", "relay", "--database", url, "--data", str(data)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    engine = create_engine(url)
    with engine.connect() as connection:
        while connection.exec_driver_sql("SELECT count(*) FROM heapline_outbox").scalar():
            assert process.poll() is None
            connection.rollback()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert re.search("^1 message relayed$", said, re.MULTILINE)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT owner FROM heapline_outbox_lane").scalars().all() == [None]
    engine.dispose()


@pytest.mark.parametrize(
    ("database", "said"),
    [
        ("sqlite:///no/such/directory/app.db", "cannot use the database (OperationalError); check --database"),
        ("sqlite:///{tmp_path}/empty.db", "heapline outbox init"),
        ("no url", "cannot use the database (ArgumentError)"),
        ("mysql+pymysql://u:secret@db/app", "the driver of this database is not installed; pip install pymysql"),
    ],
)
@pytest.mark.parametrize("command", ["relay", "status"])
def test_database_error_is_reported_without_the_url(
    data: Path, tmp_path: Path, database: str, said: str, command: str
) -> None:
    where = ["--data", data] if command == "relay" else []
    printed = " ".join(refused(command, "--database", database.format(tmp_path=tmp_path), *where).split())
    assert said in printed
    assert "secret" not in printed
    assert "Traceback" not in printed
