"""The benchmark of the Postgres broker: its arithmetic, its options, and short runs of its drivers on a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("asyncpg")

from benchmarks import __main__ as command
from benchmarks.drivers.window import Outcome
from benchmarks.sql import held, lifecycle, nodes, targets
from benchmarks.sql.database import Database
from tests.postgres import UNSYNCED, postgres_server


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    with postgres_server(UNSYNCED) as (pid, port):
        yield Database(pid, port)


def outcome(messages: int, server: float, client: float) -> Outcome:
    return Outcome(messages=messages, seconds=1.0, client_cpu_s=client, server_cpu_s=server)


@pytest.mark.parametrize("driver", ["sql", "postgres", "pgmq", "seed_table"])
def test_driver_completes_messages_and_keeps_its_backlog(database: Database, driver: str) -> None:
    first = database.drive(driver, 0.2, backlog="200")
    again = database.drive(driver, 0.2, backlog="200", keep="1")
    assert first.messages >= targets.BATCH
    assert again.messages >= targets.BATCH


def test_two_nodes_share_two_shards(database: Database) -> None:
    for shard in nodes.SHARDS:
        database.query(f"CREATE DATABASE {shard}")
    runs = nodes.both(database, 0.2)
    assert [run.messages >= targets.BATCH for run in runs] == [True, True]


def test_server_cpu_of_two_windows_is_counted_once() -> None:
    assert nodes.cpu_us([outcome(100, 1.0, 0.5), outcome(100, 1.0, 0.5)]) == pytest.approx(1e4)
    assert nodes.cpu_us([outcome(100, 1.0, 0.5)]) == pytest.approx(1.5e4)


def test_held_transaction_keeps_dead_rows(database: Database) -> None:
    database.query("CREATE TABLE IF NOT EXISTS kept (n integer)")
    with held.held(database):
        database.query("INSERT INTO kept SELECT generate_series(1, 100)")
        database.query("DELETE FROM kept")
        database.query("VACUUM kept")
        assert database.query("SELECT pg_relation_size('kept')") > 0
    database.query("VACUUM kept")
    assert database.query("SELECT pg_relation_size('kept')") == 0


def test_peer_that_is_too_fast_misses_the_target() -> None:
    ours, theirs = outcome(100, 0.1, 0.1), outcome(100, 0.1, 0.1)
    bound = targets.Bound("≥", 5.0, "×")
    first, cpu = lifecycle.figures("pgmq", ours, theirs, bound)
    assert (first["ratio"], first["met"], cpu["ratio"]) == (1.0, False, 1.0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["core", "--seconds", "10"], "--seconds is for"),
        (["sql", "--seconds", "1"], "--seconds is for"),
        (["sql", "--peers", "x"], "has no peer x"),
    ],
)
def test_options_that_do_not_apply_are_refused(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.parse(arguments)
    assert error in capsys.readouterr().err
