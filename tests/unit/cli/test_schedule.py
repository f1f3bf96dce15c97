"""`heapline schedule`: its arguments, and its output for people and for programs."""

from __future__ import annotations

import pytest

from heapline.contract.schedules import ScheduleInfo
from heapline.testing import HandClock, MemoryBroker
from tests.unit.cli.memory_cli import Cli, make_cli

NIGHTLY = ("schedule", "create", "nightly", "jobs", "report", "--cron", "0 3 * * *", "--tz", "Europe/Berlin")


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, clock: HandClock) -> Cli:
    monkeypatch.setenv("TZ", "UTC")
    made = make_cli(monkeypatch, clock)
    made("topic", "create", "jobs", "--fairness", "keys")
    return made


def test_schedule_has_every_given_option(cli: Cli) -> None:
    printed = cli.json(
        "schedule", "create", "often", "jobs", "hello", "--every", "1h30m", "--starts", "2099-01-01T00:00:00Z",
        "--ends", "2100-01-01T00:00:00Z", "--misfire", "all", "--grace", "5m", "--makeup-max", "7", "--priority", "-3",
        "--key", "k", "-H", "a=b", "--ttl", "1d", "--max-retries", "2", "--fairness-key", "me",
    )  # fmt: skip
    for moment in ("created_at", "changed_at"):
        assert printed[0].pop(moment)
    assert printed == [{
        "name": "often", "topic": "jobs", "every": 5400.0, "starts": "2099-01-01T00:00:00Z", "misfire": "all",
        "ends": "2100-01-01T00:00:00Z", "grace": 300.0, "makeup_max": 7, "priority": -3, "key": "k", "state": "active",
        "headers": {"a": "b"}, "ttl": 86400.0, "max_retries": 2, "fairness_key": "me", "payload_text": "hello",
        "fired_count": 0, "next_at": "2099-01-01T00:00:00Z",
    }]  # fmt: skip
    assert cli.json("schedule", "show", "often") == cli.json("schedule", "list")


def test_next_firing_is_shown_in_local_time(cli: Cli) -> None:
    said = cli(*NIGHTLY).stdout
    assert "nightly enqueues into jobs at 0 3 * * * Europe/Berlin" in said
    assert "next firing: " in said
    assert "UTC, in " in said
    assert "UTC, in " in cli("schedule", "list").stdout
    shown = cli("schedule", "show", "nightly").stdout
    assert shown.count("and then") == 3
    assert "report" in shown
    assert "made up by the latest one" in shown


def test_pause_resume_and_delete_show_the_next_command(cli: Cli) -> None:
    cli("schedule", "create", "a", "jobs", "--every", "1m")
    assert "heapline schedule resume a" in cli("schedule", "pause", "a").stdout
    assert cli.json("schedule", "list")[0]["state"] == "paused"
    assert "not while it is paused" in cli("schedule", "show", "a").stdout
    assert "next firing: " in cli("schedule", "resume", "a").stdout
    assert "nothing was changed" in cli("schedule", "delete", "a", typed="n\n", code=1).stderr
    assert "deleted" in cli("schedule", "delete", "a", typed="y\n").stdout
    assert "heapline schedule create" in cli("schedule", "list").stdout


def test_list_shows_problems_of_schedules(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(broker: MemoryBroker) -> list[ScheduleInfo]:
        return [ScheduleInfo(name="a", topic="jobs", every=60.0, problem="[red]it is full\x1b[0m")]

    monkeypatch.setattr(MemoryBroker, "list_schedules", failing)
    assert "a does not fire: [red]it is full\\x1b[0m\n" in cli("schedule", "list").stdout
    assert cli.json("schedule", "list")[0]["state"] == "failing"


def test_mistakes_are_reported_with_advice(cli: Cli) -> None:
    assert "needs cron" in cli("schedule", "create", "a", "jobs", code=1).stderr
    assert "heapline topic create nowhere" in cli("schedule", "create", "a", "nowhere", "--every", "1m", code=1).stderr
    assert "heapline schedule create NAME TOPIC" in cli("schedule", "show", "a", code=1).stderr
    cli(*NIGHTLY)
    assert "there are nightly" in cli("schedule", "pause", "a", code=1).stderr


@pytest.mark.parametrize("command", ["create", "list", "show", "pause", "resume", "delete"])
def test_every_schedule_command_shows_an_example(cli: Cli, command: str) -> None:
    assert f"heapline schedule {command}" in cli("schedule", command, "--help").stdout
