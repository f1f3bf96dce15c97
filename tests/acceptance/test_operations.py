"""docs/operations.md is correct: each section's shell blocks run in a fresh directory, against a real server.

Every block fenced as ```sh is run, those of one section one after the other in one bash. A comment `<!-- ground: … -->`
below the heading sets the starting point of the section: `empty`, `served` (a server with messages runs on ./data),
`damaged` (a stopped one with a bad byte) or `old` (a directory of the first format). The default ports of the page
stand for free ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import heapline
from heapline.cli.auth import open_auth
from heapline.client.transports.native import NativeBroker
from heapline.contract.errors import Unauthenticated
from heapline.journal import RealDisk, scan
from heapline.server.telemetry.broker_metrics import SQL_FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("curl") is None, reason="the page uses curl")]
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operations.md"
SMALL = {"segment_bytes": 1 << 20, "max_payload_bytes": 1 << 16}
SECTION = re.compile(r"^## (?P<title>.+?)\n(?P<body>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
GROUND = re.compile(r"<!-- ground: (\w+) -->")
WAIT = 120


class Section(NamedTuple):
    title: str
    ground: str
    blocks: list[str]


def sections() -> list[Section]:
    found = []
    for match in SECTION.finditer(PAGE.read_text(encoding="utf-8")):
        blocks, ground = BLOCK.findall(match["body"]), GROUND.search(match["body"])
        if blocks:
            assert ground, f"{match['title']}: add a `<!-- ground: … -->` comment"
            found.append(Section(match["title"], ground[1], blocks))
    return found


class Place:
    """A directory to work in, with `heapline` on the path and free ports."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / "data"
        with contextlib.ExitStack() as stack:
            taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            self.port, self.grpc_port, self.http_port = (s.getsockname()[1] for s in taken)
        command = directory / "bin" / "heapline"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m heapline "$@"\n')
        command.chmod(0o755)
        self.environment = {
            **os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "COLUMNS": "200",
            "HEAPLINE_PORT": str(self.port), "HEAPLINE_GRPC_PORT": str(self.grpc_port),
            "HEAPLINE_HTTP_PORT": str(self.http_port),
            "HEAPLINE_BROKER": '{"spare_segment_bytes": 0}',
        }  # fmt: skip

    def run(self, *blocks: str) -> str:
        script = "set -euo pipefail\n" + "\n".join(blocks)
        script = script.replace(":7480", f":{self.http_port}").replace(":7400", f":{self.port}")
        output = self.directory / "output.txt"  # a file: a server left running keeps a pipe open
        with output.open("wb") as file:
            done = subprocess.run(
                ["bash", "-c", script], cwd=self.directory, env=self.environment, stdin=subprocess.DEVNULL,
                stdout=file, stderr=file, timeout=WAIT, check=False,
            )  # fmt: skip
        text = output.read_text()
        assert done.returncode == 0, f"{text}\n{self.log()}"
        return text

    def log(self) -> str:
        path = self.directory / "heapline.log"
        return path.read_text() if path.exists() else ""

    @property
    def pid(self) -> int:
        return int((self.directory / "heapline.pid").read_text())

    def is_up(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            os.kill(self.pid, 0)
            return True
        return False

    def end(self) -> None:
        """The server that the page started, if it is still running."""
        if self.is_up():
            os.kill(self.pid, signal.SIGKILL)

    def ask(self, *, data: Path | None = None) -> list[bytes]:
        """Return what a consumer gets from the running server."""
        key = ((data or self.data) / "admin.key").read_text().strip()

        async def pop() -> list[bytes]:
            async with NativeBroker(f"127.0.0.1:{self.port}", credential=key) as broker:
                messages = await broker.pop("jobs", 1000)
                await broker.release(messages)
                return sorted(m.payload for m in messages)

        return asyncio.run(pop())


MESSAGES = [b"job %d" % n for n in range(10)]


def ground_empty(place: Place) -> None:
    pass


def ground_served(place: Place) -> None:
    start = next(s for s in sections() if s.title == "Start and stop").blocks[0]
    place.run(start)
    key = (place.data / "admin.key").read_text().strip()

    async def fill() -> None:
        async with NativeBroker(f"127.0.0.1:{place.port}", credential=key) as broker:
            await broker.create_topic("jobs", **SMALL)
            await broker.create_group("jobs", "audit", observer=True)
            for payload in MESSAGES:
                await broker.enqueue("jobs", payload)

    asyncio.run(fill())
    _, worker = open_auth(place.data).keys.create("worker-1", ["jobs:consume"])
    (place.directory / "worker-1.key").write_text(worker.reveal() + "\n")


def ground_damaged(place: Place) -> None:
    with heapline.open_sync(place.data, spare_segment_bytes=0) as hl:
        hl.create_topic("jobs", **SMALL)
        hl.create_topic("others", **SMALL)
        for payload in MESSAGES:
            hl.enqueue("jobs", payload)
    folder = place.data / "topics" / "default" / "jobs.1"
    for path in (folder / "snapshots").iterdir():
        path.unlink()
    unit = list(scan(RealDisk(), str(folder)))[-3]
    with (folder / "0000000001.seg").open("r+b") as file:
        file.seek(unit.offset + 70)
        byte = file.read(1)
        file.seek(unit.offset + 70)
        file.write(bytes([byte[0] ^ 0x10]))


def ground_old(place: Place) -> None:
    with tarfile.open(ROOT / "tests" / "fixtures" / "v1" / "data.tar.xz") as archive:
        archive.extractall(place.directory / "unpacked", filter="data")
    found = next((place.directory / "unpacked").rglob("catalog.json")).parent
    shutil.copytree(found, place.data)


# -- what each section promises ----------------------------------------------------------------------------------------


def check_start_and_stop(place: Place, reported: str) -> None:
    assert "ok" in reported
    assert not place.is_up()
    assert stat.S_IMODE((place.data / "admin.key").stat().st_mode) == 0o600
    assert '"event": "stopped"' in place.log()


def check_health(place: Place, reported: str) -> None:
    assert reported.split() == ["ok", "ok"]


def check_watch(place: Place, reported: str) -> None:
    assert 'backlog{partition="0",topic="jobs"} 10.0' in reported
    page, metrics = PAGE.read_text(), (place.directory / "metrics.txt").read_text()
    table = page.split("## Metrics to watch")[1].split("## Logs")[0]
    cells = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([a-z_]+)", cell)}
    exposed = set(re.findall(r"^# TYPE (\w+)", metrics, re.MULTILINE))
    exposed |= {family.name for family in SQL_FAMILIES}  # only on Postgres; test_sql_serve.py reads them
    assert len(named) > 20
    assert {name for name in named if not {name, name.removesuffix("_total")} & exposed} == set()


def check_logs(place: Place, reported: str) -> None:
    assert "order-77" in reported
    assert '"event": "serving"' in reported


def check_backup(place: Place, reported: str) -> None:
    assert place.is_up()
    assert place.ask() == MESSAGES
    assert (place.directory / "data.old" / "catalog.json").exists()


def check_disk_full(place: Place, reported: str) -> None:
    assert "jobs" in reported


def check_corruption(place: Place, reported: str) -> None:
    assert "there is damage" in reported
    assert (place.data / "topics" / "default" / "jobs.1" / "damaged").is_dir()
    with heapline.open_sync(place.data, spare_segment_bytes=0) as hl:
        left = [m.payload for m in hl.pop("jobs", 100)]
    assert 0 < len(left) < len(MESSAGES)
    assert left == MESSAGES[: len(left)]  # those before the damage, and no others


def check_rotating_keys(place: Place, reported: str) -> None:
    assert "worker-1" in reported
    new, old = ((place.directory / f"worker-{n}.key").read_text().strip() for n in (2, 1))

    async def use(key: str) -> int:
        async with NativeBroker(f"127.0.0.1:{place.port}", credential=key) as broker:
            return len(await broker.pop("jobs", 1))

    assert asyncio.run(use(new)) == 1
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:  # the page promises one second; the machine may be busy
        try:
            asyncio.run(use(old))
        except Unauthenticated:
            return
        time.sleep(0.1)
    pytest.fail("a revoked key is still accepted")


def check_lost_key(place: Place, reported: str) -> None:
    key = (place.directory / "admin-2.key").read_text().strip()

    async def use() -> None:
        async with NativeBroker(f"127.0.0.1:{place.port}", credential=key) as broker:
            await broker.create_topic("made-by-the-new-one", **SMALL)

    asyncio.run(use())
    assert "admin-2" in reported


def check_certificates(place: Place, reported: str) -> None:
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (place.directory / "certs").iterdir())


def check_upgrading(place: Place, reported: str) -> None:
    assert place.is_up()
    assert (place.directory / "before-upgrade" / "catalog.json").exists()
    assert "refused" not in place.log()


def check_moving(place: Place, reported: str) -> None:
    assert place.is_up()
    assert place.ask(data=place.directory / "elsewhere" / "data") == MESSAGES


GROUNDS: dict[str, Callable[[Place], None]] = {
    "empty": ground_empty, "served": ground_served, "damaged": ground_damaged, "old": ground_old
}  # fmt: skip
CHECKS: dict[str, Callable[[Place, str], None]] = {
    "Start and stop": check_start_and_stop, "Health": check_health, "Metrics to watch": check_watch,
    "Logs and traces": check_logs, "Back up and restore": check_backup, "Disk full": check_disk_full,
    "Corruption": check_corruption, "Rotate keys": check_rotating_keys, "Replace a lost admin key": check_lost_key,
    "Rotate TLS certificates": check_certificates, "Upgrade": check_upgrading,
    "Move to another machine": check_moving,
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.end()


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.title)
def test_operations_section_runs_as_written(section: Section, place: Place) -> None:
    GROUNDS[section.ground](place)
    reported = place.run(*section.blocks)
    CHECKS[section.title](place, reported)


def test_every_section_with_commands_has_its_promises_checked() -> None:
    assert [section.title for section in sections()] == list(CHECKS)
