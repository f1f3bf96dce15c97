"""`heapline top` against a server process: for scripts, and live in a terminal of 80×24."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import heapline
from tests.integration.server_process import Process

pytestmark = pytest.mark.slow

PATIENCE = 60.0
HOME, STYLES = b"\x1b[H", re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Scene:
    """A server with a topic in every state, and the command line beside it."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.process = Process(data)

    async def start(self, *flags: str) -> None:
        self.process = Process(self.data, *flags)
        await self.process.__aenter__()

    @property
    def options(self) -> list[str]:
        return ["--to", self.process.target, "--key-file", str(self.data / "admin.key"), "--interval", "0.2"]

    def connect(self) -> Any:
        return heapline.connect(self.process.target, api_key=(self.data / "admin.key").read_text().strip())

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        made = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "heapline", "top", *arguments, *self.options, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
        )  # fmt: skip
        out, errors = await asyncio.wait_for(made.communicate(), PATIENCE)
        return made.returncode or 0, out.decode(), errors.decode()


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return {
        **kept,
        "PYTHONPATH": str(Path(heapline.__file__).parents[1]),
        "TERM": "xterm-256color",
        "LC_ALL": "C.UTF-8",
    }


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path / "data")
    await scene.start()
    try:
        async with scene.connect() as hl:
            await hl.create_topic("jobs", partitions=3)
            await hl.enqueue_batch("jobs", [heapline.Outgoing(b"x", priority=n) for n in range(20)])
            await hl.enqueue("jobs", b"soon", delay=600)
            await hl.pop("jobs", 4, visibility=600)
            await hl.create_topic("mail")
        yield scene
    finally:
        await scene.process.__aexit__()


class Terminal:
    """A program in a terminal of 80×24, and its screen."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "heapline", *command], stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, env=environment(),
        )  # fmt: skip
        os.close(slave)
        self._written, self._more = b"", asyncio.Event()
        asyncio.get_running_loop().add_reader(self._master, self._read)

    def _read(self) -> None:
        try:
            self._written += os.read(self._master, 65536)
        except OSError:  # the other end is closed
            asyncio.get_running_loop().remove_reader(self._master)
        self._more.set()

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def frame(self) -> str:
        """Return the last complete frame."""
        frames = self._written.split(HOME)
        return STYLES.sub("", frames[-2].decode("utf-8", "replace")) if len(frames) > 1 else ""

    async def until(self, holds: Callable[[str], Any]) -> str:
        async with asyncio.timeout(PATIENCE):
            while not holds(self.frame()):
                self._more.clear()
                await self._more.wait()
        return self.frame()

    async def ended(self) -> int:
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), PATIENCE)

    async def __aenter__(self) -> Terminal:
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._master)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._master)


def row_of(text: str, name: str) -> list[str]:
    return next((line.split() for line in text.splitlines() if line.startswith(name)), [])


async def test_without_a_terminal_one_sample_is_printed_as_lines(scene: Scene) -> None:
    code, out, errors = await scene.run()
    assert (code, errors) == (0, "")
    assert row_of(out, "jobs")[:5] == ["jobs", "16", "1", "4", "0"]
    assert row_of(out, "mail")[:2] == ["mail", "0"]
    assert "\x1b" not in out


async def test_one_topic_is_shown_with_its_partitions(scene: Scene) -> None:
    code, out, errors = await scene.run("jobs", "--once")
    assert (code, errors) == (0, "")
    assert [row_of(out, f"    {n}")[0] for n in range(3)] == ["0", "1", "2"]
    assert sum(int(row_of(out, f"    {n}")[1]) for n in range(3)) == 16


async def test_json_is_one_object_per_refresh(scene: Scene) -> None:
    code, out, _ = await scene.run("--once", "--json", "--filter", "job")
    reported = json.loads(out)
    assert code == 0
    assert [topic["topic"] for topic in reported["topics"]] == ["jobs"]
    jobs = reported["topics"][0]
    assert (jobs["ready"], jobs["delayed"], jobs["leased"], jobs["rates"]["enqueued"]) == (16, 1, 4, 0)
    assert 0 < jobs["lease_ends_in"] <= 600
    assert jobs["latency_ms"]["commit"]["p50"] is None, "nothing was committed between the two samples"


async def test_unknown_topic_and_unreachable_server_are_errors(scene: Scene) -> None:
    code, _, errors = await scene.run("nothing")
    assert (code, "topic 'nothing' does not exist" in errors) == (1, True), errors
    await scene.process.kill()
    code, out, errors = await scene.run("--json")
    assert (code, out) == (1, "")
    assert "heapline serve" in errors
    assert "Traceback" not in errors


async def test_live_view_shows_topics_opens_one_and_ends_on_q(scene: Scene) -> None:
    async with Terminal("top", *scene.options) as terminal:
        frame = await terminal.until(lambda text: row_of(text, "jobs"))
        assert row_of(frame, "jobs")[:5] == ["jobs", "16", "1", "4", "0"]
        assert len(frame.splitlines()) == 24
        async with scene.connect() as hl:
            await hl.enqueue_batch("mail", [heapline.Outgoing(b"x")] * 7)
        await terminal.until(lambda text: row_of(text, "mail")[1:2] == ["7"])
        terminal.press("\x1b[B\r")
        frame = await terminal.until(lambda text: "TAKEN/S" in text)
        assert row_of(frame, "    2")
        terminal.press("\x1b")
        await terminal.until(lambda text: row_of(text, "mail"))
        terminal.press("q")
        assert await terminal.ended() == 0


async def test_live_view_survives_a_restart_of_its_server(scene: Scene) -> None:
    port = scene.process.target.rpartition(":")[2]
    async with Terminal("top", *scene.options) as terminal:
        await terminal.until(lambda text: row_of(text, "jobs"))
        await scene.process.kill()
        frame = await terminal.until(lambda text: "connection lost" in text)
        assert row_of(frame, "jobs")[:5] == ["jobs", "16", "1", "4", "0"], "known numbers stay"
        await scene.start("--port", port)
        async with scene.connect() as hl:
            await hl.enqueue("mail", b"x")
        frame = await terminal.until(lambda text: row_of(text, "mail")[1:2] == ["1"])
        assert "connection lost" not in frame
        terminal.press("q")
        assert await terminal.ended() == 0
