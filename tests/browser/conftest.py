"""A real Chromium in front of a real server.

Tests click as people do. They neither evaluate scripts in the page, which the policy against scripts does not apply to,
nor switch that policy off. A message of the console, a violated policy or an exception in a page fails its test.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import hatch_build
import heapline

PATIENCE = 60.0  # seconds for a server to start on a busy machine
ANSWER_MS = 20_000  # for a page to show what it should
BROWSERS = ("chromium", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def expect(target: Any) -> Any:
    """Return Playwright's assertions, which wait. It is imported here, because tests are collected without it too."""
    from playwright.sync_api import expect as made

    return made(target)


def until(holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until a condition holds that no page shows."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "the condition does not hold"
        time.sleep(0.1)


class ServerProcess:
    """`heapline serve` on a directory. It keeps its ports when it is restarted, as open pages expect."""

    def __init__(self, data: Path, *flags: str, program: Sequence[str] = ("-m", "heapline")) -> None:
        self.data, self._flags, self._program = data, flags, program
        self.port = self.http_port = 0

    def start(self) -> ServerProcess:
        command = [sys.executable, *self._program, "serve", "--data", str(self.data), "--port", str(self.port)]
        command += ["--grpc-port", "0", "--http-port", str(self.http_port), *self._flags]
        self._log = self.data.with_name("server.log").open("ab")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        found = re.search(r"Heapline on port (\d+), gRPC on port \d+, HTTP on port (\d+)", line)
        assert found, line + self.data.with_name("server.log").read_text()
        self.port, self.http_port = int(found[1]), int(found[2])
        return self

    def stop(self, by: int = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(by)
        self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()

    @property
    def key(self) -> str:
        return (self.data / "admin.key").read_text().strip()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}/ui"

    def client(self, key: str | None = None) -> Any:
        return heapline.connect_sync(f"127.0.0.1:{self.port}", api_key=key or self.key)


@dataclass
class Watch:
    """The errors in the pages of a test, without those that it expects."""

    expected: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.seen.append(text)

    def faults(self) -> list[str]:
        return [text for text in self.seen if not any(part in text for part in self.expected)]


@pytest.fixture(scope="module")  # Playwright's loop runs in this thread, where tests of other files run theirs
def chromium() -> Iterator[Any]:
    from playwright.sync_api import expect as assertions
    from playwright.sync_api import sync_playwright

    assertions.set_options(timeout=ANSWER_MS)

    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no browser is installed; see `make setup`")
    if not hatch_build.has_front_end(Path(hatch_build.__file__).parent):
        pytest.skip("the dashboard's third-party files are missing; run python hatch_build.py")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that tests share; each uses topics of its own."""
    made = ServerProcess(tmp_path_factory.mktemp("dashboard") / "data").start()
    yield made
    made.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Start a server for one test, with flags."""
    made: list[ServerProcess] = []

    def start(*flags: str) -> ServerProcess:
        made.append(ServerProcess(tmp_path / f"data{len(made)}", *flags))
        return made[-1].start()

    yield start
    for each in made:
        each.stop()


@pytest.fixture
def watch() -> Iterator[Watch]:
    found = Watch()
    yield found
    assert not found.faults()


@pytest.fixture
def new_page(chromium: Any, watch: Watch) -> Iterator[Callable[..., Any]]:
    """Open a page of a new browser profile, or with `beside=page` another tab of that page's profile."""
    contexts: list[Any] = []

    def open_page(beside: Any = None, **options: Any) -> Any:
        if beside is None:
            contexts.append(chromium.new_context(viewport={"width": 1280, "height": 860}, **options))
            contexts[-1].set_default_timeout(ANSWER_MS)
        page = (contexts[-1] if beside is None else beside.context).new_page()
        page.on("console", lambda message: watch.add(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: watch.add(f"exception: {error}"))
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def log_in(new_page: Callable[..., Any]) -> Callable[..., Any]:
    """Log in by clicking, and return the page."""

    def start(server: ServerProcess, key: str | None = None, **options: Any) -> Any:
        page = new_page(**options)
        page.goto(server.url)
        page.get_by_label("API key").fill(key or server.key)
        page.get_by_role("button", name="Log in with a key").click()
        page.get_by_role("heading", name="Overview").wait_for()
        return page

    return start
