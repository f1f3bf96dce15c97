"""`heapline group …`, on an in-memory broker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heapline.cli.group import member_name
from heapline.testing import HandClock
from tests.unit.cli.memory_cli import Cli, make_cli


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    cli = make_cli(monkeypatch, HandClock())
    cli("topic", "create", "jobs")
    return cli


def put(cli: Cli, *payloads: str) -> None:
    for payload in payloads:
        cli("put", "jobs", payload)


def read(cli: Cli, *more: str, code: int = 0) -> list[Any]:
    return cli.json("group", "read", "jobs", "--group", "g", "--wait", "300ms", *more, code=code)


def give_up(cli: Cli, *payloads: str) -> None:
    """Enqueue messages and let a group fail all of them."""

    async def work() -> None:
        await cli.broker.create_group("jobs", "g", max_retries=0)
        fetched = await cli.broker.group_fetch("jobs", "g", "m", session="s", wait=5)
        for batch in fetched.batches:
            offsets = {batch.partition: batch.offsets.tolist()}
            await cli.broker.group_nack("jobs", "g", "m", offsets, session="s", reason="bad \x1b[31m")
        await cli.broker.group_leave("jobs", "g", "m", session="s")

    put(cli, *payloads)
    asyncio.run(work())


# -- read --------------------------------------------------------------------------------------------------------------


def test_read_shows_rows_in_order_and_acks_them(cli: Cli) -> None:
    put(cli, "one", "two")
    rows = read(cli)
    assert [(row["payload_text"], row["attempts"]) for row in rows] == [("one", 1), ("two", 1)]
    assert read(cli, code=3) == []
    shown = cli("group", "read", "jobs", "-g", "g", "--wait", "200ms", code=3)
    assert "it has read everything" in shown.stderr


def test_read_shows_offset_and_escaped_payload(cli: Cli) -> None:
    cli("put", "jobs", "a\x1b[31mb", "--key", "k1", "-H", "trace=x")
    shown = cli("group", "read", "jobs", "-g", "g", "--wait", "300ms")
    assert "\x1b[31m" not in shown.stdout
    assert "a\\x1b[31mb" in shown.stdout
    assert "key k1" in shown.stdout
    assert "trace: x" in shown.stdout
    assert "1 row acked" in shown.stderr


def test_read_stops_at_its_limit_and_leaves_the_other_rows(cli: Cli) -> None:
    put(cli, "one", "two", "three")
    assert [row["payload_text"] for row in read(cli, "-n", "2")] == ["one", "two"]
    assert [row["payload_text"] for row in read(cli)] == ["three"]


def test_read_without_ack_changes_nothing(cli: Cli) -> None:
    put(cli, "one")
    for _ in range(2):
        assert [(row["payload_text"], row["attempts"]) for row in read(cli, "--no-ack")] == [("one", 1)]
    assert cli.json("group", "show", "jobs", "g")[0]["lag"] == 1


def test_read_starts_a_new_group_at_the_given_position(cli: Cli) -> None:
    put(cli, "one")
    assert read(cli, "--start", "latest", code=3) == []
    put(cli, "two")
    assert [row["payload_text"] for row in read(cli)] == ["two"]


# -- groups ------------------------------------------------------------------------------------------------------------


def test_group_is_created_with_its_settings_and_says_how_to_read_it(cli: Cli) -> None:
    (output,) = cli.json("group", "create", "jobs", "g", "--ack-timeout", "1m", "--max-retries", "3")
    assert (output["name"], output["topic"], output["lag"], output["config"]["ack_timeout"]) == ("g", "jobs", 0, 60.0)
    shown = cli("group", "create", "jobs", "g", "--ack-timeout", "1m", "--max-retries", "3").stdout
    assert "heapline group read jobs --group g" in shown
    refused = cli("group", "create", "jobs", "g", "--max-retries", "4", code=1)
    assert "heapline group delete jobs g" in refused.stderr


@pytest.mark.parametrize(
    ("where", "lag"), [("earliest", 2), ("latest", 0), ("0", 2), ("0=0", 2), ("1h", 2), ("2030-01-31T12:00:00Z", 0)]
)
def test_position_has_many_forms(cli: Cli, where: str, lag: int) -> None:
    put(cli, "one", "two")
    assert cli.json("group", "create", "jobs", "g", "--start", where)[0]["lag"] == lag


@pytest.mark.parametrize("where", ["middle", "x=1", "0=", "-1"])
def test_invalid_position_is_refused_with_its_option(cli: Cli, where: str) -> None:
    refused = cli("group", "create", "jobs", "g", "--start", where, code=2)
    assert "--start" in refused.stderr


def test_list_shows_lag_and_state_of_each_group(cli: Cli) -> None:
    assert "heapline group create jobs" in cli("group", "list", "jobs").stdout
    put(cli, "one")
    cli("group", "create", "jobs", "b")
    cli("group", "create", "jobs", "a", "--observer")
    assert [(output["name"], output["lag"]) for output in cli.json("group", "list", "jobs")] == [("a", 1), ("b", 1)]
    shown = cli("group", "list", "jobs").stdout
    assert "observer" in shown
    assert "holds the journal" in shown


def test_show_and_offsets_have_lag_by_partition_and_member(cli: Cli) -> None:
    cli("topic", "create", "wide", "--partitions", "2")
    cli("put", "wide", "x")

    async def join() -> None:
        await cli.broker.group_fetch("wide", "g", "m1", session="s", max_messages=0)

    asyncio.run(join())
    output = cli.json("group", "offsets", "wide", "g")
    assert [(o["partition"], o["member"]) for o in output] == [(0, "m1"), (1, "m1")]
    assert sum(o["lag"] for o in output) == 1
    shown = cli("group", "show", "wide", "g").stdout
    assert "m1 reads 0, 1" in shown
    assert "1 row behind" in shown
    assert "all" in cli("group", "offsets", "wide", "g").stdout


def test_reset_asks_first_and_shows_the_new_offsets(cli: Cli) -> None:
    put(cli, "one", "two")
    read(cli)
    assert (
        "nothing was changed" in cli("group", "reset", "jobs", "g", "--where", "earliest", typed="n\n", code=1).stderr
    )
    assert cli.json("group", "reset", "jobs", "g", "--where", "earliest", "--yes")[0]["lag"] == 2
    assert cli.json("group", "reset", "jobs", "g", "--where", "latest", "--partition", "0", typed="y\n")[0]["lag"] == 0


def test_delete_asks_first(cli: Cli) -> None:
    cli("group", "create", "jobs", "g")
    cli("group", "delete", "jobs", "g", typed="n\n", code=1)
    assert cli.json("group", "delete", "jobs", "g", "-y") == [{"topic": "jobs", "group": "g", "deleted": True}]
    assert cli.json("group", "list", "jobs") == []


def test_unknown_group_is_refused_with_the_existing_ones(cli: Cli) -> None:
    cli("group", "create", "jobs", "billing")
    refused = cli("group", "show", "jobs", "biling", code=1).stderr
    assert "there are billing" in refused
    assert "heapline group create jobs biling" in refused


# -- dead letters ------------------------------------------------------------------------------------------------------


def test_dead_letters_are_listed_replayed_and_deleted(cli: Cli) -> None:
    give_up(cli, "one", "two", "three")
    letters = cli.json("group", "dead", "list", "jobs", "g")
    assert [letter["payload_text"] for letter in letters] == ["one", "two", "three"]
    shown = cli("group", "dead", "list", "jobs", "g").stdout
    assert "bad \\x1b[31m" in shown
    row = f"0:{letters[1]['offset']}"
    assert row in shown
    assert cli.json("group", "dead", "replay", "jobs", "g", row) == [{"count": 1}]
    again = cli("group", "dead", "replay", "jobs", "g", row, row, code=1)
    assert "1 of the 1 rows are not dead letters of group g" in again.stderr
    assert [r["payload_text"] for r in read(cli)] == ["two"]
    cli("group", "dead", "delete", "jobs", "g", "--all", typed="n\n", code=1)
    assert "2 rows" in cli("group", "dead", "delete", "jobs", "g", "--all", "--yes").stdout
    assert "has no dead letters" in cli("group", "dead", "list", "jobs", "g").stdout


@pytest.mark.parametrize("verb", ["replay", "delete"])
def test_dead_letters_must_be_named_or_all(cli: Cli, verb: str) -> None:
    give_up(cli, "one")
    for chosen in ([], ["0:1", "--all"]):
        refused = cli("group", "dead", verb, "jobs", "g", *chosen, code=1)
        assert "heapline group dead list jobs g" in refused.stderr
    assert len(cli.json("group", "dead", "list", "jobs", "g")) == 1


@pytest.mark.parametrize("command", ["create", "list", "show", "offsets", "reset", "delete", "read", "dead list"])
def test_every_group_command_shows_an_example(cli: Cli, command: str) -> None:
    shown = cli("group", *command.split(), "--help").stdout
    assert f"heapline group {command} jobs" in " ".join(shown.split())


def test_member_name_cannot_move_the_cursor() -> None:
    assert member_name("m\x1b[2J[red]") == r"m\x1b[2J\[red]"
