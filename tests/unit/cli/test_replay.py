"""`heapline replay …` on a broker in memory."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
import typer

from heapline.cli import options, replay
from heapline.testing import HandClock
from tests.unit.cli.memory_cli import Cli, make_cli


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Five messages in "jobs", and a topic "again"."""
    monkeypatch.setattr(replay, "POLL_SECONDS", 0.0)
    cli = make_cli(monkeypatch, HandClock())
    for topic in ("jobs", "again"):
        cli("topic", "create", topic)
    for number in range(5):
        cli("put", "jobs", f"job {number}", "--priority", str(number), "--header", f"odd={number % 2}")
    return cli


def test_read_prints_one_line_per_row_with_its_offset(cli: Cli) -> None:
    lines = cli("replay", "read", "jobs").stdout.splitlines()
    assert len(lines) == 5
    assert lines[3].startswith("0:3 ")
    assert lines[3].endswith("priority 3  job 3")
    output = cli.json("replay", "read", "jobs", "--start", "1", "-n", "2")
    assert [(t["offset"], t["payload_text"], t["headers"]) for t in output] == [
        (1, "job 1", {"odd": "1"}), (2, "job 2", {"odd": "0"}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (["--header", "odd=1"], [1, 3]),
        (["--priority-min", "2", "--priority-max", "3"], [2, 3]),
        (["--start", "1h"], [0, 1, 2, 3, 4]),
        (["--start", "0:3"], [3, 4]),
        (["--end", "2"], [0, 1]),
        (["--start", "latest"], []),
        (["--fast", "--partition", "0"], [0, 1, 2, 3, 4]),
    ],
)
def test_rows_are_selected_by_options(cli: Cli, options: list[str], numbers: list[int]) -> None:
    output = cli.json("replay", "read", "jobs", *options)
    assert [t["payload_text"] for t in output] == [f"job {n}" for n in numbers]


def test_checkpoint_continues_where_the_last_read_ended(cli: Cli) -> None:
    assert len(cli.json("replay", "read", "jobs", "--checkpoint", "mine", "-n", "2")) == 2
    rest = cli.json("replay", "read", "jobs", "--checkpoint", "mine")
    assert [t["payload_text"] for t in rest] == ["job 2", "job 3", "job 4"]
    assert "jobs has no matching rows" in cli("replay", "read", "jobs", "--checkpoint", "mine").stdout


def test_replay_is_started_followed_listed_and_shown(cli: Cli) -> None:
    shown = cli("replay", "start", "monday", "jobs", "--into", "again", "--priority", "9", "--follow").stdout
    assert "done" in shown
    assert "5 messages" in shown
    (info,) = cli.json("replay", "show", "monday")
    assert (info["state"], info["replayed"], info["into"]) == ("done", 5, "again")
    assert cli.json("replay", "list") == [info]
    assert "monday" in cli("replay", "list").stdout
    assert {t["priority"] for t in cli.json("peek", "again")} == {9}
    assert cli.json("replay", "start", "monday", "jobs", "--into", "again", "--priority", "9") == [info]
    assert "ReplayExists" in cli("replay", "start", "monday", "jobs", code=1).stderr


def test_failed_replay_has_exit_code_1_and_a_reason(cli: Cli) -> None:
    cli("topic", "create", "small", "--max-payload-bytes", "3")
    shown = cli("replay", "start", "bad", "jobs", "--into", "small", "--follow", code=1).stdout
    assert "offset 0 of partition 0 cannot go in" in " ".join(shown.split())


def test_running_replay_is_cancelled(cli: Cli) -> None:
    cli("replay", "start", "slow", "jobs", "--into", "again", "--rate", "0.001")
    (info,) = cli.json("replay", "cancel", "slow")
    assert info["state"] == "cancelled"
    assert "ReplayNotFound" in cli("replay", "cancel", "none", code=1).stderr


def test_list_without_replays_says_how_to_start_one(cli: Cli) -> None:
    assert "heapline replay start --help" in cli("replay", "list").stdout


@pytest.mark.parametrize(
    ("text", "meant"),
    [("earliest", "earliest"), ("12", 12), ("0:1,3:4", {0: 1, 3: 4}),
     ("2030-01-31T12:00:00Z", datetime(2030, 1, 31, 12, tzinfo=UTC))],
)  # fmt: skip
def test_position_forms_are_parsed(text: str, meant: Any) -> None:
    assert options.position(text) == meant


@pytest.mark.parametrize("text", ["", "never", "0:", "-1", "2030-01-31T12:00:00", "0:1;2:3"])
def test_invalid_position_lists_the_valid_forms(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="how long ago"):
        options.position(text)
