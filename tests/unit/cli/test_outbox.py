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
from heapline.cli.main import app
from heapline.client import outbox

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


def test_relay_once_brings_what_is_there_and_status_tells_of_the_rest(url: str, data: Path) -> None:
    assert "are there" in run("init", "--database", url)
    assert "are there" in run("init", "--database", url)
    write(url, b"1", b"2", bytes(11))
    assert run("status", "--database", url) == "waiting: 3\n"
    assert "2 messages relayed" in run("relay", "--database", url, "--data", data, "--once")
    told = run("status", "--database", url)
    assert told.startswith("refused: 1\nrow 3 for jobs: PayloadTooLarge")
    with heapline.open_sync(data, spare_segment_bytes=0) as hl:
        assert sorted(m.payload for m in hl.pop("jobs", 10)) == [b"1", b"2"]


def test_relay_says_what_it_needs(url: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEAPLINE_URL", raising=False)
    assert "say where the broker is: --to host:port" in refused("relay", "--database", url)
    both = refused("relay", "--database", url, "--data", data, "--to", "localhost:7400")
    assert "not both" in both
    assert "--database" in refused("relay")
    monkeypatch.setattr("heapline.cli.outbox.find_spec", lambda name: None)
    assert "pip install 'heapline[outbox]'" in refused("status", "--database", url)


def test_relay_ends_on_sigterm_and_gives_its_lane_back(url: str, data: Path) -> None:
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
    assert re.search("^1 messages relayed$", said, re.MULTILINE)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT owner FROM heapline_outbox_lane").scalars().all() == [None]
    engine.dispose()


@pytest.mark.parametrize(
    ("database", "said"),
    [
        ("sqlite:///no/such/directory/app.db", "the database cannot be used (OperationalError): check --database"),
        ("sqlite:///{tmp_path}/empty.db", "heapline outbox init"),
        ("no url", "the database cannot be used (ArgumentError)"),
        ("mysql+pymysql://u:secret@db/app", "the driver of that database is not installed: pip install pymysql"),
    ],
)
@pytest.mark.parametrize("command", ["relay", "status"])
def test_trouble_with_the_database_is_told_without_its_url(
    data: Path, tmp_path: Path, database: str, said: str, command: str
) -> None:
    where = ["--data", data] if command == "relay" else []
    told = " ".join(refused(command, "--database", database.format(tmp_path=tmp_path), *where).split())
    assert said in told
    assert "secret" not in told
    assert "Traceback" not in told
