"""Run network commands on an in-memory broker, without a network."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest
from typer.testing import CliRunner

from heapline.cli import connection, main
from heapline.testing import HandClock, MemoryBroker


class Cli:
    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker
        self.columns = 160
        self.charset = "utf-8"  # of the terminal

    def __call__(self, *arguments: str, typed: str | bytes = "", code: int = 0) -> Any:
        """Run a command and check its exit code."""
        environment = {"COLUMNS": str(self.columns)}
        result = CliRunner(charset=self.charset).invoke(main.app, list(arguments), input=typed, env=environment)
        assert result.exit_code == code, result.output + repr(result.exception)
        return result

    def json(self, *arguments: str, typed: str | bytes = "", code: int = 0) -> list[Any]:
        result = self(*arguments, "--json", typed=typed, code=code)
        return [json.loads(line) for line in result.stdout.splitlines()]


def make_cli(monkeypatch: pytest.MonkeyPatch, clock: HandClock) -> Cli:
    broker = MemoryBroker(clock)
    monkeypatch.setattr(connection, "connect", lambda settings: nullcontext(broker))
    for name in ("HEAPLINE_URL", "HEAPLINE_API_KEY_FILE", "HEAPLINE_CA_FILE", "HEAPLINE_DATA"):
        monkeypatch.delenv(name, raising=False)
    return Cli(broker)
