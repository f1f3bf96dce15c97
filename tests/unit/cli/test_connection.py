"""How a command finds its server and its key, and what it says when it does not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from heapline.cli import advice, connection, main
from heapline.client import connecting
from heapline.errors import (
    BadRequest,
    DeadlineExceeded,
    PermissionDenied,
    TopicNotFound,
    Unauthenticated,
    UnavailableError,
)
from heapline.testing import MemoryBroker

COMMANDS = (
    "topic create", "topic list", "topic show", "topic update", "topic delete", "put", "peek", "pop", "get", "dlq list",
    "dlq replay", "dlq delete", "replay read", "replay start", "replay list", "replay show", "replay cancel",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (connecting.URL, connecting.KEY_FILE, connecting.CA_FILE, connecting.DATA):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[connection.Settings]:
    """What commands would have connected with."""
    found: list[connection.Settings] = []

    def connect(settings: connection.Settings) -> Any:
        found.append(settings)
        raise BadRequest("enough seen")

    monkeypatch.setattr(connection, "connect", connect)
    return found


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as taken:  # bound and never listened on
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def run(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(main.app, list(arguments), env={"COLUMNS": "200", **environment})


def where(*endpoints: str, key: str | None = None, local: str | None = None) -> advice.Where:
    return advice.Where(endpoints, Path(key) if key else None, Path(local) if local else None)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches_by_example_and_takes_the_options_of_a_connection(command: str) -> None:
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
    assert ("--yes" in shown) is command.endswith("delete")


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
    assert [s.tls is not None for s in settled] == [False, True, False]


def test_key_of_a_server_on_this_machine_is_found_by_itself(settled: list[connection.Settings], tmp_path: Path) -> None:
    for directory in ("data", "other"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "admin.key").write_text(f"hl_{directory}")
    run("topic", "list")
    run("topic", "list", HEAPLINE_DATA="other")
    run("topic", "list", "--to", "queue.internal:7400")  # a local key is nobody else's business
    assert [s.key for s in settled] == ["hl_data", "hl_other", None]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--key-file", "nowhere"], "the key file 'nowhere' cannot be read: No such file"),
        (["--key-file", "empty"], "the key file 'empty' must hold one API key and nothing else"),
        (["--to", ","], "--to names no server"),
        (["--to", "http://x"], "heaplines://host:port"),
    ],
)
def test_bad_connection_option_is_refused(tmp_path: Path, flags: list[str], said: str) -> None:
    (tmp_path / "empty").touch()
    result = run("topic", "list", *flags)
    assert result.exit_code == 1
    assert said in result.stderr


def test_key_is_no_option_and_stands_in_no_message(tmp_path: Path, settled: list[connection.Settings]) -> None:
    (tmp_path / "key").write_text("hl_secret")
    assert run("topic", "list", "--key", "hl_secret").exit_code == 2
    assert "hl_secret" not in run("topic", "list", "--key-file", "key").output
    assert settled[0].key == "hl_secret"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ImportError("no gRPC")

    monkeypatch.setattr(connecting, "_need_grpc", absent)
    result = run("put", "jobs", "x")
    assert (result.exit_code, "pip install 'heapline[client]'" in result.stderr) == (1, True)


@pytest.mark.parametrize(("command", "extra"), [("put", "client"), ("worker", "client"), ("keys", "server")])
def test_command_that_cannot_be_imported_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, command: str, extra: str
) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'google'", name="google")

    monkeypatch.setattr(main.importlib, "import_module", absent)
    assert f"heapline[{extra}]" in run(command, "x").stderr


def test_server_that_is_not_there_is_told_at_once_and_with_what_to_do(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "QUIET_SECONDS", 0)
    result = run("topic", "list", "--to", f"127.0.0.1:{closed_port}", "--timeout", "1s")
    assert result.exit_code == 1
    first, last = result.stderr.splitlines()
    assert first == f"nobody listens at 127.0.0.1:{closed_port}; trying for 1s …"
    assert f"obody listens at 127.0.0.1:{closed_port}" in last
    assert "heapline serve --data data" in last


def test_message_for_a_server_that_is_not_there_is_told_so_too(closed_port: int) -> None:
    said = run("put", "jobs", "x", "--to", f"127.0.0.1:{closed_port}", "--timeout", "300ms").stderr
    assert f"obody listens at 127.0.0.1:{closed_port}" in said


async def advise(error: Exception, about: advice.Where) -> str:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs")
        shown = await advice.advised(error, hl, about)  # type: ignore[arg-type]
        assert type(shown) is type(error) or isinstance(error, UnavailableError)
        return str(shown)


def unreached() -> UnavailableError:
    error = UnavailableError("failed to connect")
    error.reached = False
    return error


async def test_missing_key_says_where_it_was_looked_for() -> None:
    near = await advise(Unauthenticated("who?"), where("localhost:7400", local="data/admin.key"))
    for text in ("--key-file", "HEAPLINE_API_KEY_FILE", "'data/admin.key' cannot be read", "heapline keys create"):
        assert text in near
    assert "admin.key" not in await advise(Unauthenticated("who?"), where("queue:7400"))
    assert "does not know the key in 'my.key'" in await advise(Unauthenticated("who?"), where("q:1", key="my.key"))


async def test_server_elsewhere_is_not_told_to_be_started_here() -> None:
    said = await advise(unreached(), where("nowhere.invalid:7400"))
    assert "nobody listens at nowhere.invalid:7400, so nothing was changed. Check --to" in said
    assert "heapline serve" not in said


async def test_somebody_who_speaks_otherwise_is_told_apart_from_nobody() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        for error in (unreached(), DeadlineExceeded("ListHeaps")):
            assert "TLS" in await advise(error, where(f"127.0.0.1:{port}", local="data/admin.key"))


async def test_call_that_was_given_up_says_whether_anybody_listens_now() -> None:
    said = await advise(DeadlineExceeded("Pop"), where("nowhere.invalid:1", local="data/admin.key"))
    assert said.startswith(str(DeadlineExceeded("Pop")))  # what is known of the call stands first
    assert "Nobody listens at nowhere.invalid:1 now. Start a server with: heapline serve" in said


async def test_unknown_topic_is_told_with_those_that_there_are() -> None:
    assert "there are jobs. Make it with: heapline topic create nix" in await advise(TopicNotFound("nix"), where("q:1"))


async def test_other_errors_are_told_as_they_are() -> None:
    error = PermissionDenied("key:a", "produce", "jobs")
    assert await advise(error, where("q:1")) == str(error)
    assert await advise(UnavailableError("the server is stopping"), where("q:1")) == "the server is stopping"
