"""Expected failures of real `heapline` processes: one line on stderr that says what to do, and no traceback."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import heapline
from tests.integration.server_process import Process

pytestmark = pytest.mark.slow

SOURCE = str(Path(heapline.__file__).parents[1])
#: Root ignores file modes, unless it drops this capability.
WITHOUT_ROOT_RIGHTS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []


def failed(*arguments: object, home: Path, prefix: Sequence[str] = ()) -> str:
    """Run a command that must fail with exit code 1; return its only line on stderr."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEAPLINE_")}
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "heapline", *map(str, arguments)],
        env={**kept, "PYTHONPATH": SOURCE, "COLUMNS": "80"},
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return line


def data_of(server: Process) -> Path:
    return server._data


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with asyncio.Runner() as runner:
        process = Process(tmp_path_factory.mktemp("server") / "data")
        runner.run(process.__aenter__())
        yield process
        runner.run(process.kill())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file"


@pytest.mark.parametrize("flag", ["--port", "--grpc-port", "--http-port"])
def test_port_in_use_names_the_port_and_its_option(tmp_path: Path, flag: str) -> None:
    ports = {"--port": 0, "--grpc-port": 0, "--http-port": 0}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports[flag] = port = taken.getsockname()[1]
        flags = [part for pair in ports.items() for part in pair]
        said = failed("serve", "--data", tmp_path / "data", *flags, home=tmp_path)
    assert f"cannot listen on 127.0.0.1 port {port} (Address already in use); " in said
    assert f"choose another port with {flag}" in said
    assert not (tmp_path / "data").exists(), "nothing was created"


def test_address_of_another_machine_names_host(tmp_path: Path) -> None:
    host = ("--host", "192.0.2.1", "--plaintext")
    said = failed(
        "serve", "--data", tmp_path / "data", *host, "--port", 0, "--grpc-port", 0, "--http-port", 0, home=tmp_path
    )
    assert "cannot listen on 192.0.2.1" in said
    assert "--host" in said


def test_directory_in_use_is_named(server: Process, tmp_path: Path) -> None:
    said = failed("serve", "--data", data_of(server), "--port", 0, "--grpc-port", 0, "--http-port", 0, home=tmp_path)
    assert said.startswith("DirectoryLocked: ")
    assert "heapline serve" in said


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--port", "0", "--grpc-port", "0", "--http-port", "0", "--data"],
        ["keys", "list", "--data"],
        ["journal", "verify"],
        ["journal", "repair"],
        ["bench", "--data"],
        ["demo", "--messages", "100", "--dir"],
        ["certs", "dev"],
        ["backup", "--data", "data", "--to"],
        ["pipeline", "audit", "--topic", "jobs", "--path"],
    ],
)
@pytest.mark.parametrize("below", [False, True])
def test_file_in_place_of_a_directory_is_named(command: list[str], below: bool, file: Path) -> None:
    with heapline.open_sync(file.parent / "data", spare_segment_bytes=0):
        pass
    said = failed(*command, file / "sub" if below else file, home=file.parent)
    assert f"{file.parent}/file" in said


@pytest.mark.skipif(WITHOUT_ROOT_RIGHTS != [] and shutil.which("setpriv") is None, reason="root, and no setpriv")
@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--port", "0", "--grpc-port", "0", "--http-port", "0", "--data"],
        ["demo", "--messages", "100", "--dir"],
        ["certs", "dev"],
    ],
)
def test_missing_permission_is_named(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "read-only").mkdir(mode=0o500)
    said = failed(*command, tmp_path / "read-only" / "new", home=tmp_path, prefix=WITHOUT_ROOT_RIGHTS)
    assert f"{tmp_path}/read-only/new': Permission denied; " in said
    assert "choose another path" in said


def test_wrong_key_names_its_file(server: Process, tmp_path: Path) -> None:
    (tmp_path / "bad.key").write_text("hl_0000000000000000_nothing\n")
    said = failed("topic", "list", "--to", server.target, "--key-file", "bad.key", home=tmp_path)
    assert "rejects the key in 'bad.key'" in said
    assert "--key-file FILE" in said
    assert "nothing" not in said


def test_missing_key_error_lists_the_searched_places(server: Process, tmp_path: Path) -> None:
    said = failed("topic", "list", "--to", server.target, home=tmp_path)
    assert "needs an API key, and none was found" in said
    assert "'data/admin.key' cannot be read" in said


def test_error_for_a_stopped_server_says_how_to_start_one(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        to = f"127.0.0.1:{taken.getsockname()[1]}"
        said = failed("topic", "list", "--to", to, "--timeout", "300ms", home=tmp_path)
    assert f"no server listens at {to}" in said
    assert "heapline serve --data data" in said


def test_unknown_topic_says_how_to_create_it(server: Process, tmp_path: Path) -> None:
    key = data_of(server) / "admin.key"
    said = failed("pop", "nix", "--to", server.target, "--key-file", key, home=tmp_path)
    assert said.startswith("TopicNotFound: topic 'nix' does not exist")
    assert "heapline topic create nix" in said


@pytest.mark.parametrize("authority", ["other", "missing", "none"])
def test_wrong_certificate_mentions_tls(authority: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "heapline", "certs", "dev"]
    for name in ("certs", "other"):
        subprocess.run([*command, name], cwd=tmp_path, env={**os.environ, "PYTHONPATH": SOURCE}, check=True)
    certs = tmp_path / "certs"
    tls = ("--tls-certificate", str(certs / "server.crt"), "--tls-key", str(certs / "server.key"))
    ca = [] if authority == "none" else ["--ca", tmp_path / authority / "ca.crt"]
    with asyncio.Runner() as runner:
        process = Process(tmp_path / "data", *tls)
        runner.run(process.__aenter__())
        said = failed("topic", "list", "--to", process.target, *ca, "--timeout", "400ms", home=tmp_path)
        runner.run(process.kill())
    assert "TLS" in said
