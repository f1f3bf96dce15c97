"""Commands find their server and key, or say what to do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from heapline.cli import connection, main
from heapline.client import connect
from heapline.contract.errors import (
    BadRequest,
    DeadlineExceeded,
    PermissionDenied,
    TopicNotFound,
    Unauthenticated,
    UnavailableError,
    Unsupported,
)
from heapline.testing import MemoryBroker

COMMANDS = (
    "topic create", "topic list", "topic show", "topic update", "topic delete", "put", "peek", "pop", "get", "dlq list",
    "dlq replay", "dlq delete", "topic pause", "topic resume", "topic purge", "cancel", "reschedule", "replay read",
    "replay start", "replay list", "replay show", "replay cancel",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (connect.URL, connect.KEY_FILE, connect.CA_FILE, connect.DATA):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[connection.Settings]:
    """Collect the settings that commands connect with."""
    found: list[connection.Settings] = []

    def connect(settings: connection.Settings) -> Any:
        found.append(settings)
        raise BadRequest("enough seen")

    monkeypatch.setattr(connection, "connect", connect)
    return found


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def run(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(main.app, list(arguments), env={"COLUMNS": "200", **environment})


def where(*endpoints: str, key: str | None = None, local: str | None = None) -> connection.Settings:
    return connection.Settings(endpoints, Path(key) if key else None, Path(local) if local else None)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_network_command_has_an_example_and_connection_options(command: str) -> None:
    shown = run(*command.split(), "--help").stdout
    assert f"Example:  heapline {command} " in shown.replace("\n", " ")
    for option in (
        "--to",
        "--key-file",
        "--ca",
        "--timeout",
        "HEAPLINE_URL",
        "HEAPLINE_API_KEY_FILE",
        "localhost:7400",
    ):
        assert option in shown
    assert "--json" in shown
    assert ("--yes" in shown) is command.endswith(("delete", "purge"))


def test_server_and_key_come_from_options_then_environment_then_default(
    settled: list[connection.Settings], tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"hl_{name}\n")
    run("topic", "list", "--to", "one:1, two", "--key-file", "a", "--timeout", "3m", HEAPLINE_URL="env:1")
    run("topic", "list", HEAPLINE_URL="env:1", HEAPLINE_API_KEY_FILE="b", HEAPLINE_CA_FILE="ca.crt")
    run("topic", "list")
    assert [(s.endpoints, s.key, s.timeout) for s in settled] == [
        (["one:1", "two"], "hl_a", 180.0), (["env:1"], "hl_b", 10.0), (["localhost:7400"], None, 10.0)
    ]  # fmt: skip
    assert [s.ca is not None for s in settled] == [False, True, False]


def test_key_of_a_local_server_is_found_automatically(settled: list[connection.Settings], tmp_path: Path) -> None:
    for directory in ("data", "other"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "admin.key").write_text(f"hl_{directory}")
    run("topic", "list")
    run("topic", "list", HEAPLINE_DATA="other")
    run("topic", "list", "--to", "queue.internal:7400")  # a local key is never sent to another machine
    assert [s.key for s in settled] == ["hl_data", "hl_other", None]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--key-file", "nowhere"], "cannot read the key file 'nowhere': No such file"),
        (["--key-file", "empty"], "the key file 'empty' must contain one API key and nothing else"),
        (["--to", ","], "--to is empty"),
        (["--to", "ftp://x"], "heapline+tls://host:port"),
    ],
)
def test_bad_connection_option_is_refused(tmp_path: Path, flags: list[str], said: str) -> None:
    (tmp_path / "empty").touch()
    result = run("topic", "list", *flags)
    assert result.exit_code == 1
    assert said in result.stderr


def test_key_is_not_an_option_and_in_no_message(tmp_path: Path, settled: list[connection.Settings]) -> None:
    (tmp_path / "key").write_text("hl_secret")
    assert run("topic", "list", "--key", "hl_secret").exit_code == 2
    assert "hl_secret" not in run("topic", "list", "--key-file", "key").output
    assert settled[0].key == "hl_secret"


@pytest.mark.parametrize(
    ("command", "extra"), [("put", "client"), ("worker", "client"), ("keys", "server"), ("outbox", "outbox")]
)
def test_command_that_cannot_be_imported_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, command: str, extra: str
) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'google'", name="google")

    monkeypatch.setattr(main.importlib, "import_module", absent)
    assert f"heapline[{extra}]" in run(command, "x").stderr


def test_unreachable_server_is_reported_early_with_advice(closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "QUIET_SECONDS", 0)
    result = run("topic", "list", "--to", f"127.0.0.1:{closed_port}", "--timeout", "1s")
    assert result.exit_code == 1
    first, last = result.stderr.splitlines()
    assert first == f"no server listens at 127.0.0.1:{closed_port}; trying for 1s …"
    assert f"o server listens at 127.0.0.1:{closed_port}" in last
    assert "heapline serve --data data" in last


def test_put_reports_a_stopped_server(closed_port: int) -> None:
    said = run("put", "jobs", "x", "--to", f"127.0.0.1:{closed_port}", "--timeout", "300ms").stderr
    assert f"o server listens at 127.0.0.1:{closed_port}" in said


async def advise(error: Exception, about: connection.Settings) -> str:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs")
        shown = await connection.advised(error, hl, about)  # type: ignore[arg-type]
        assert type(shown) is type(error) or isinstance(error, UnavailableError)
        return str(shown)


def unreached() -> UnavailableError:
    error = UnavailableError("failed to connect")
    error.reached = False
    return error


async def test_missing_key_error_lists_the_searched_places() -> None:
    near = await advise(Unauthenticated("who?"), where("localhost:7400", local="data/admin.key"))
    for text in ("--key-file", "HEAPLINE_API_KEY_FILE", "'data/admin.key' cannot be read", "heapline keys create"):
        assert text in near
    assert "admin.key" not in await advise(Unauthenticated("who?"), where("queue:7400"))
    assert "rejects the key in 'my.key'" in await advise(Unauthenticated("who?"), where("q:1", key="my.key"))


async def test_unreachable_remote_server_gets_no_advice_to_start_one() -> None:
    said = await advise(unreached(), where("nowhere.invalid:7400"))
    assert "no server listens at nowhere.invalid:7400; nothing was changed. Check --to" in said
    assert "heapline serve" not in said


async def test_listener_with_another_protocol_is_distinguished_from_none() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        for error in (unreached(), DeadlineExceeded("ListHeaps")):
            assert "TLS" in await advise(error, where(f"127.0.0.1:{port}", local="data/admin.key"))


async def test_expired_call_says_whether_a_server_listens_now() -> None:
    said = await advise(DeadlineExceeded("Pop"), where("nowhere.invalid:1", local="data/admin.key"))
    assert said.startswith(str(DeadlineExceeded("Pop")))  # the error of the call comes first
    assert "no server listens at nowhere.invalid:1 now. Start a server with: heapline serve" in said


async def test_unknown_topic_is_refused_with_the_existing_ones() -> None:
    said = await advise(TopicNotFound("nix"), where("q:1"))
    assert "there are jobs. Create it with: heapline topic create nix" in said


async def test_unsupported_call_names_a_broker_that_supports_it() -> None:
    said = await advise(Unsupported("CreateGroup", "groups"), where("q:1"))
    assert "q:1 does not support CreateGroup (feature 'groups'); use a server with the log broker" in said
    assert "describe()" not in said


async def test_other_errors_are_shown_unchanged() -> None:
    error = PermissionDenied("key:a", "produce", "jobs")
    assert await advise(error, where("q:1")) == str(error)
    assert await advise(UnavailableError("the server is stopping"), where("q:1")) == "the server is stopping"
