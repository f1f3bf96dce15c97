"""`heapline sink`: what is listed, and that nothing is forgotten by mistake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from heapline.cli import connection
from heapline.testing import HandClock, MemoryBroker
from tests.unit.cli.memory_cli import Cli, make_cli


class SinkCli(Cli):
    """Every command finds a broker with one sink; `left` is what there is after it."""

    left: tuple[str, ...]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> SinkCli:
    made = SinkCli(make_cli(monkeypatch, HandClock()).broker)

    @asynccontextmanager
    async def connect(settings: Any) -> AsyncIterator[MemoryBroker]:
        async with MemoryBroker(HandClock()) as broker:
            await broker.commit_batch("b", [], sink="txn:load", version=7)
            yield broker
            made.left = tuple(sink.name for sink in await broker.list_sinks())

    monkeypatch.setattr(connection, "connect", connect)
    return made


def test_sinks_are_listed_for_people_and_programs(cli: SinkCli) -> None:
    said = cli("sink", "list").stdout
    assert "txn:load" in said
    assert "7" in said
    (printed,) = cli.json("sink", "list")
    assert (printed["name"], printed["version"], printed["batch_id"], printed["messages"], printed["topics"]) == (
        "txn:load", 7, "b", 0, [],
    )  # fmt: skip


def test_nothing_is_listed_where_nothing_was_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    cli = make_cli(monkeypatch, HandClock())
    assert "no sink has committed anything" in cli("sink", "list").stdout
    assert cli.json("sink", "list") == []


def test_forget_asks_first_and_forgets_with_yes(cli: SinkCli) -> None:
    refused = cli("sink", "forget", "txn:load", typed="n\n", code=1)
    assert "at version 7" in refused.output
    assert cli.json("sink", "forget", "txn:load", "--yes") == [{"name": "txn:load", "forgotten": True}]
    assert cli.left == ()


def test_unknown_sink_is_refused(cli: SinkCli) -> None:
    assert "sink 'x' does not exist" in cli("sink", "forget", "x", "--yes", code=1).output
