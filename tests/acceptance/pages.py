"""Pages of the documentation as programs: their blocks, and how a reader would run them.

The text after a fence's backticks decides:

- `python`: run, with `await` at top level, in the one interpreter and event loop of its page.
- `sh`: run by the one bash of its page, with `heapline`, `python` and `pytest` of this tree.
- `python tasks.py`, `yaml worker.yaml`: a file of that name, written into the page's directory.
- `text`, right after a block that was run: the expected output of that block; `…` matches anything.

A comment before a block excludes it and gives the reason: `<!-- not run: … -->`. Ports 7400 and 7480 stand for
those of the page's server. This module does not know what a page promises.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+?) -->\n+)?"
    r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"^\s*heapline ([a-z]+)", re.MULTILINE)
OBITUARY = re.compile(r"^\S+: line \d+: +\d+ (Killed|Terminated) .*\n", re.MULTILINE)  # bash's own message about a job
PATIENCE = 120.0  # seconds for one block of shell on a busy machine


@dataclass(frozen=True)
class Block:
    language: str
    file: str | None  # it is written to the directory, not run
    body: str
    line: int  # of its first line in the page, from 1
    reason: str | None  # why it is excluded

    @property
    def is_run(self) -> bool:
        return self.reason is None and self.file is None and self.language in ("python", "sh")

    def commands(self) -> list[str]:
        """Subcommands of `heapline` that the block uses."""
        return COMMAND.findall(self.body) if self.language == "sh" and self.is_run else []


def blocks_of(text: str, line: int = 1) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        language, _, file = match["info"].strip().partition(" ")
        first = line + text.count("\n", 0, match.start("body"))
        found.append(Block(language, file or None, match["body"], first, match["reason"]))
    return found


@dataclass(frozen=True)
class Ports:
    native: int
    http: int

    def put_into(self, text: str) -> str:
        return text.replace(":7400", f":{self.native}").replace(":7480", f":{self.http}")


class Reader:
    """A reader who follows a page in a directory, from its first block to its last."""

    def __init__(self, directory: Path, ports: Ports) -> None:
        self.directory, self.ports = directory, ports
        self.environment = {**os.environ, **_settings(ports), "PATH": f"{directory}/.bin:{os.environ['PATH']}"}
        for name in ("HEAPLINE_API_KEY_FILE", "HEAPLINE_CA_FILE", "HEAPLINE_DATA"):
            self.environment.pop(name, None)
        self._make_commands()
        self._runner = asyncio.Runner()
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._bash: subprocess.Popen[bytes] | None = None
        self._count = 0

    def __enter__(self) -> Reader:
        sys.path.insert(0, str(self.directory))
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()
        sys.path.remove(str(self.directory))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(self.directory)):
                del sys.modules[name]
        if self._bash is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(
                    self._bash.pid, signal.SIGKILL
                )  # a separate session, to stop bash and everything that the page left running
            self._bash.communicate()

    def _make_commands(self) -> None:
        commands = {"heapline": "-m heapline", "python": "", "pytest": "-m pytest -p heapline_pytest"}
        (self.directory / ".bin").mkdir()
        for name, arguments in commands.items():
            command = self.directory / ".bin" / name
            command.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
            command.chmod(0o755)

    def follow(self, page: str, blocks: list[Block], known: set[str]) -> list[str]:
        """Run the blocks, except those that use subcommands not in `known`; return these subcommands."""
        missing: list[str] = []
        said: str | None = None
        for block in blocks:
            if unknown := [command for command in block.commands() if command not in known]:
                missing += unknown
                said = None
            elif block.reason is not None:
                said = None
            elif block.file is not None:
                path = self.directory / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self.ports.put_into(block.body))
            elif block.language == "text":
                assert said is None or fits(block.body, said), f"{page}:{block.line} shows this, but got:\n{said}"
            elif block.language == "python":
                said = self._run_python(page, block)
            elif block.language == "sh":
                said = self._run_shell(page, block)
        return missing

    def _run_python(self, page: str, block: Block) -> str:
        # The blank lines make a traceback point into the document itself.
        source = "\n" * (block.line - 1) + self.ports.put_into(block.body)
        code = compile(source, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with contextlib.redirect_stdout(io.StringIO()) as reported:
            outcome = eval(code, self._names)
            if inspect.iscoroutine(outcome):
                self._runner.run(outcome)
        return reported.getvalue()

    def _run_shell(self, page: str, block: Block) -> str:
        if self._bash is None:
            self._bash = subprocess.Popen(
                ["bash"], cwd=self.directory, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._count += 1
        script, reported, done = (
            self.directory / ".bin" / f"{self._count}.{kind}" for kind in ("sh", "reported", "done")
        )
        script.write_text("set -eo pipefail\n" + self.ports.put_into(block.body))
        reported.touch()
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"exec > {reported} 2>&1\nsource {script} < /dev/null\ntouch {done}\n".encode())
        self._bash.stdin.flush()
        deadline = time.monotonic() + PATIENCE
        while not done.exists():
            failed = self._bash.poll() is not None or time.monotonic() > deadline
            assert not failed, f"{page}:{block.line} does not work:\n{reported.read_text()}\n{self._logs()}"
            time.sleep(0.02)
        return OBITUARY.sub("", reported.read_text())

    def _logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in self.directory.glob("*.log"))


def fits(shown: str, said: str) -> bool:
    """Compare line by line; `…` matches any text, and `…` alone any number of lines.

    >>> fits("1 of …\\n…\\nend\\n", "1 of 7\\na\\nb\\nend\\n"), fits("1\\n", "2\\n")
    (True, False)
    """
    lines = [line.rstrip() for line in shown.strip().splitlines()]
    pattern = "".join(
        r"(?:.*\n)*?" if line == "…" else re.escape(line).replace("…", ".*?") + r"[ ]*\n" for line in lines
    )
    return re.fullmatch(pattern, said.strip() + "\n") is not None


def _settings(ports: Ports) -> dict[str, str]:
    return {
        "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", "COLUMNS": "120",
        "HEAPLINE_URL": f"localhost:{ports.native}",
        "HEAPLINE_PORT": str(ports.native), "HEAPLINE_GRPC_PORT": "0", "HEAPLINE_HTTP_PORT": str(ports.http),
        "HEAPLINE_BROKER": '{"spare_segment_bytes": 0}',
    }  # fmt: skip
