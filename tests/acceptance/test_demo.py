"""`heapline demo` as a newcomer runs it: it kills a real process, checks every message and removes its files."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import heapline
from heapline.cli import demo as demo_module
from heapline.cli.main import app

MESSAGES = "2000"


def run_demo(*options: str, tmp: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(tmp), "COLUMNS": "100"}
    command = [sys.executable, "-m", "heapline", "demo", "--messages", MESSAGES, *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def unboxed(output: str) -> str:
    """Return the text of an error box without its wrapping."""
    return " ".join(output.replace("│", " ").split())


def facts(output: str) -> dict[str, str]:
    """Return the final table."""
    rows = [line.split("│") for line in output.splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for _, name, value, _ in rows}


def test_demo_survives_kill_9_and_cleans_up(tmp_path: Path) -> None:
    done = run_demo(tmp=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    table = facts(done.stdout)
    assert table["enqueued"].startswith("2 000 in ")
    promises = ("lost", "out of order", "delivered again after an answered ack", "payloads damaged")
    assert [table[name] for name in promises] == ["0"] * 4
    assert table["killed with SIGKILL"].endswith("of 2 000")
    assert "killed after" in done.stdout
    assert "\x1b" not in done.stdout, "plain lines without a terminal"
    assert list(tmp_path.iterdir()) == []


def test_demo_keeps_its_directory_if_asked(tmp_path: Path) -> None:
    done = run_demo("--keep", "--dir", str(tmp_path / "queue"), tmp=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = CliRunner().invoke(app, ["journal", "verify", str(tmp_path / "queue" / "data")])
    assert verdict.exit_code == 0, verdict.output


def test_demo_refuses_a_non_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("do not touch")
    done = run_demo("--dir", str(tmp_path), tmp=tmp_path)
    assert done.returncode == 2
    assert "not empty" in unboxed(done.stderr)
    assert (tmp_path / "precious").read_text() == "do not touch"


def invoke(tmp_path: Path) -> Any:
    return CliRunner().invoke(app, ["demo", "--messages", MESSAGES, "--dir", str(tmp_path / "queue")])


def test_demo_fails_if_messages_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def drain_nothing(*_: Any) -> None:
        return

    monkeypatch.setattr(demo_module, "_drain", drain_nothing)
    result = invoke(tmp_path)
    assert result.exit_code == 1
    assert "FAILED" in result.output
    assert "lost" in result.output.partition("FAILED")[2]
    assert not (tmp_path / "queue").exists()


def test_demo_fails_if_a_payload_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "number_of", lambda payload: -1)
    result = invoke(tmp_path)
    assert result.exit_code == 1
    assert "with a damaged payload" in result.output


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_demo_serve_uses_other_ports_beside_another_server(stop: signal.Signals, tmp_path: Path) -> None:
    """A port of the user's own server is in use: the demo uses others, and removes its files when it stops."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # another process has the port already
            held.enter_context(socket.create_server(("127.0.0.1", 7400)))
        command = [sys.executable, "-m", "heapline", "demo", "--serve"]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        demo = held.enter_context(subprocess.Popen(command, env=environment, **pipes))
        assert demo.stdout is not None
        try:
            link = next(line for line in demo.stdout if "heapline dashboard" in line)
            found = re.search(r"--to 127.0.0.1:(\d+) .*--key-file (\S+)", link)
            assert found is not None
            assert found[1] != "7400"
            with heapline.connect_sync(f"127.0.0.1:{found[1]}", api_key=Path(found[2]).read_text().strip()) as hl:
                while not hl.list_topics():  # the load creates them
                    pass
        finally:
            demo.send_signal(stop)
            assert demo.wait(60) == 0
    assert not list(tmp_path.iterdir())
