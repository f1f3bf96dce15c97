"""`heapline topic`: settings as flags, and what is shown of a topic."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from heapline.cli import topic
from heapline.contract.config import FIXED_FIELDS, Aging, Backoff, TopicConfig
from heapline.testing import HandClock
from tests.unit.cli.memory_cli import Cli, make_cli


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, clock: HandClock) -> Cli:
    return make_cli(monkeypatch, clock)


def test_every_setting_of_a_topic_has_a_flag() -> None:
    named = {s.name for s in topic.SETTINGS}
    fields = set(TopicConfig.__struct_fields__) - {"backoff"}
    assert named == fields | {f"backoff_{name}" for name in Backoff.__struct_fields__}


#: As typed, and what the topic is made with.
TYPED: dict[str, tuple[list[str], Any]] = {
    "mode": (["--mode", "max"], "max"),
    "ordering": (["--aging", "2.5"], Aging(2.5)),
    "partitions": (["--partitions", "3"], 3),
    "k": (["--k", "7"], 7),
    "strategy": (["--strategy", "round_robin"], "round_robin"),
    "partition_weights": (["--partition-weight", "0=2.5", "--partition-weight", "1=1"], {0: 2.5, 1: 1.0}),
    "max_staleness": (["--max-staleness", "1m"], 60.0),
    "min_freshness": (["--min-freshness", "250ms"], 0.25),
    "visibility_default": (["--visibility-default", "5m"], 300.0),
    "lease_max": (["--lease-max", "2d"], 172800.0),
    "max_inflight": (["--max-inflight", "9"], 9),
    "max_pops_per_second": (["--max-pops-per-second", "1.5"], 1.5),
    "max_retries_default": (["--max-retries-default", "3"], 3),
    "backoff": (["--backoff-base", "5s", "--backoff-factor", "3", "--backoff-max", "1h", "--backoff-jitter", "0"],
                Backoff(base=5.0, factor=3.0, max=3600.0, jitter=0.0)),
    "dlq": (["--no-dlq"], False),
    "max_backlog": (["--max-backlog", "100"], 100),
    "max_payload_bytes": (["--max-payload-bytes", "64KiB"], 65536),
    "dedup_window": (["--dedup-window", "1h30m"], 5400.0),
    "retention": (["--retention", "7d"], 604800.0),
    "retention_bytes": (["--retention-bytes", "1GiB"], 1 << 30),
    "retention_margin": (["--retention-margin", "1000"], 1000),
    "retention_hard_bytes": (["--retention-hard-bytes", "2GiB"], 2 << 30),
    "retention_hard_age": (["--retention-hard-age", "30d"], 2592000.0),
    "segment_bytes": (["--segment-bytes", "16MiB"], 16 << 20),
    "fsync": (["--fsync", "interval"], "interval"),
    "fsync_interval": (["--fsync-interval", "20ms"], 0.02),
    "tick": (["--tick", "50ms"], 0.05),
    "streams": (["--no-streams"], False),
}  # fmt: skip


def config_of(printed: dict[str, Any]) -> TopicConfig:
    weights = {int(p): w for p, w in printed["config"].pop("partition_weights").items()}
    return msgspec.convert(printed["config"] | {"partition_weights": weights}, TopicConfig)


def test_topic_is_created_with_every_given_setting(cli: Cli) -> None:
    flags = [flag for typed, _ in TYPED.values() for flag in typed]
    (printed,) = cli.json("topic", "create", "jobs", *flags)
    assert printed["topic"] == "jobs"
    config = config_of(printed)
    assert {name: getattr(config, name) for name in TYPED} == {name: value for name, (_, value) in TYPED.items()}
    (again,) = cli.json("topic", "show", "jobs")
    assert config_of(again) == config
    shown = cli("topic", "show", "jobs", "--settings").stdout
    for text in ("0=2.5, 1=1", "2.5 per second", "1h30m", "64KiB", "250ms"):
        assert text in shown


def test_fairness_between_keys_is_set_by_flags(cli: Cli) -> None:
    (printed,) = cli.json("topic", "create", "fair", "--fairness", "keys", "--max-inflight-per-key", "2")
    assert (printed["config"]["fairness"], printed["config"]["max_inflight_per_key"]) == ("keys", 2)


def test_create_shows_the_main_settings_and_the_next_command(cli: Cli) -> None:
    shown = cli("topic", "create", "jobs", "--mode", "max").stdout
    assert "topic jobs is ready: largest priority first, leases of 30s, 1 partition" in shown
    assert "heapline put jobs hello" in shown


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--k", "0"], 1, "k must be an integer from 1 to 2147483648, got 0"),
        (["--mode", "middle"], 1, "mode"),
        (["--visibility-default", "2d"], 1, "visibility_default must be at most lease_max, 43200, got 172800.0"),
        (["--visibility-default", "soon"], 2, "is not a duration"),
        (["--max-payload-bytes", "1MB"], 2, "is not a size"),
        (["--partition-weight", "a=b"], 1, "PARTITION=WEIGHT"),
        (["--aging", "0"], 1, "ordering must be 'strict', or aging with a rate over 0"),
        (["--fairness", "keys", "--aging", "1"], 1, "choose one"),
    ],
)
def test_bad_setting_is_refused_and_creates_no_topic(cli: Cli, flags: list[str], code: int, said: str) -> None:
    assert said in " ".join(cli("topic", "create", "jobs", *flags, code=code).stderr.split())
    assert cli.broker.topic_names() == []


def test_repeated_create_changes_nothing_and_other_settings_are_refused(cli: Cli) -> None:
    cli("topic", "create", "jobs")
    cli("topic", "create", "jobs")
    said = cli("topic", "create", "jobs", "--k", "2", code=1).stderr
    assert "TopicExists: topic 'jobs' already exists with different settings (k)" in said
    assert "heapline topic update jobs" in said


def test_create_with_another_mode_does_not_advise_an_update(cli: Cli) -> None:
    cli("topic", "create", "jobs")
    said = " ".join(cli("topic", "create", "jobs", "--mode", "max", code=1).stderr.split())
    assert "different settings (mode); mode cannot be changed; choose another name" in said
    assert "update" not in said


def test_update_changes_given_settings_and_shows_before_and_after(cli: Cli) -> None:
    cli("topic", "create", "jobs", "--backoff-factor", "3")
    shown = cli("topic", "update", "jobs", "--backoff-base", "5s", "--max-retries-default", "2").stdout
    assert ["backoff_base", "1s", "5s"] in [
        [c.strip() for c in line.strip("│").split("│")] for line in shown.splitlines()
    ]
    assert "backoff_factor" not in shown
    (printed,) = cli.json("topic", "show", "jobs")
    assert (printed["config"]["backoff"]["base"], printed["config"]["backoff"]["factor"]) == (5.0, 3.0)
    assert printed["config"]["max_retries_default"] == 2


def test_update_without_effect_says_so(cli: Cli) -> None:
    cli("topic", "create", "jobs")
    assert "already has these settings" in cli("topic", "update", "jobs", "--k", "1").stdout


@pytest.mark.parametrize("flags", [["--mode", "max"], ["--aging", "1"], ["--no-streams"], ["--segment-bytes", "1MiB"]])
def test_update_of_a_fixed_setting_is_refused_by_the_topic(cli: Cli, flags: list[str]) -> None:
    cli("topic", "create", "jobs", "--max-payload-bytes", "4k")
    assert "of a topic cannot be changed" in cli("topic", "update", "jobs", *flags, code=1).stderr


def test_update_help_lists_fixed_settings(cli: Cli) -> None:
    printed = (topic.update_command.__doc__ or "").split("cannot be changed later: ")[1].strip(" .\n").split(", ")
    flags = {"ordering": "--aging"}
    assert set(printed) == {flags.get(name, "--" + name.replace("_", "-")) for name in FIXED_FIELDS}
    assert "--mode " not in cli("topic", "update", "--help").stdout


def test_update_without_settings_is_refused(cli: Cli) -> None:
    cli("topic", "create", "jobs")
    assert "at least one setting" in cli("topic", "update", "jobs", code=1).stderr


def test_list_shows_depths_of_each_topic(cli: Cli) -> None:
    assert "heapline topic create" in cli("topic", "list").stdout
    cli("topic", "create", "b")
    cli("topic", "create", "shop/a", "--partitions", "2")
    for flags in ([], ["--delay", "1h"]):
        cli("put", "b", "x", *flags)
    printed = cli.json("topic", "list")
    assert [(t["topic"], t["stats"]["ready"], t["stats"]["delayed"]) for t in printed] == [
        ("b", 1, 1),
        ("shop/a", 0, 0),
    ]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in cli("topic", "list").stdout.splitlines()]
    assert ["b", "1", "1", "0", "0"] in [row[:5] for row in rows]


def test_show_lists_partitions_and_changed_settings(cli: Cli) -> None:
    cli("topic", "create", "jobs", "--partitions", "2", "--k", "3")
    cli("put", "jobs", "x", "--delay", "2m")
    shown = cli("topic", "show", "jobs").stdout
    assert "next within 10m" in shown
    assert "all other settings have default values" in shown
    assert "lease_max" not in shown
    assert "lease_max" in cli("topic", "show", "jobs", "--settings").stdout
    assert cli("topic", "show", "default/jobs").stdout.splitlines()[0].strip() == "jobs"


def test_delete_asks_and_shows_what_would_be_lost(cli: Cli) -> None:
    cli("topic", "create", "jobs")
    cli("put", "jobs", "x")
    refused = cli("topic", "delete", "jobs", typed="n\n", code=1)
    assert "with 1 ready, 0 delayed, 0 leased, 0 dead?" in refused.stderr
    assert "nothing was changed" in refused.stderr
    assert "--yes" in cli("topic", "delete", "jobs", code=1).stderr  # stdin is empty
    assert cli.broker.topic_names() == ["jobs"]
    cli("topic", "delete", "jobs", typed="y\n")
    assert cli.broker.topic_names() == []


def test_delete_with_yes_does_not_ask(cli: Cli) -> None:
    cli("topic", "create", "jobs")
    assert cli("topic", "delete", "jobs", "--yes").output == "topic jobs deleted\n"
    cli("topic", "create", "jobs")
    assert cli.json("topic", "delete", "jobs", "-y") == [{"topic": "jobs", "deleted": True}]
    assert cli.broker.topic_names() == []


def test_paused_topic_delivers_nothing_until_it_is_resumed(cli: Cli) -> None:
    cli("topic", "create", "jobs")
    cli("put", "jobs", "x")
    shown = cli("topic", "pause", "jobs").stdout
    assert "topic jobs is paused\n" in shown
    assert "heapline topic resume jobs" in shown
    cli("pop", "jobs", code=3)
    assert cli.json("topic", "show", "jobs")[0]["stats"]["paused"]
    assert "the topic is paused" in cli("pop", "jobs", code=3).stderr
    assert "delivers messages" in cli("topic", "resume", "jobs").stdout
    assert len(cli.json("pop", "jobs")) == 1


def test_pause_can_end_at_a_time(cli: Cli) -> None:
    cli("topic", "create", "jobs")
    (printed,) = cli.json("topic", "pause", "jobs", "--until", "2100-01-01T00:00:00Z")
    assert printed == {"topic": "jobs", "paused": True, "until": "2100-01-01T00:00:00Z"}
    assert "is paused until 2" in cli("topic", "pause", "jobs", "--for", "1h").stdout
    assert cli.json("topic", "resume", "jobs") == [{"topic": "jobs", "paused": False}]
    both = cli("topic", "pause", "jobs", "--for", "1h", "--until", "2100-01-01T00:00:00Z", code=1)
    assert "exclude each other" in both.stderr


def test_purge_asks_and_removes_waiting_messages_only(cli: Cli, clock: HandClock) -> None:
    cli("topic", "create", "jobs")
    for flags in ([], ["--delay", "1h"], ["-p", "-1"]):
        cli("put", "jobs", "x", *flags)
    cli("pop", "jobs")
    clock.advance(1)
    refused = cli("topic", "purge", "jobs", typed="n\n", code=1)
    assert "Permanently remove 2 waiting messages of topic jobs?" in refused.stderr
    assert "--yes" in cli("topic", "purge", "jobs", code=1).stderr
    assert cli("topic", "purge", "jobs", typed="y\n").stdout == "2 messages removed from topic jobs\n"
    assert cli.json("topic", "purge", "jobs", "-y") == [{"topic": "jobs", "count": 0}]
    assert [message.state for message in cli.broker.standing("jobs")] == ["leased"]


def test_invalid_topic_name_is_refused_as_such(cli: Cli) -> None:
    assert cli("topic", "show", "a b", code=1).stderr.startswith("BadName: 'a b' is not a topic name")


@pytest.mark.parametrize("command", ["show", "delete", "update"])
def test_unknown_topic_is_refused_with_the_existing_ones(cli: Cli, command: str) -> None:
    cli("topic", "create", "jobs")
    flags = ["--k", "2"] if command == "update" else []
    said = cli("topic", command, "jbos", *flags, code=1).stderr
    assert "TopicNotFound: topic 'jbos' does not exist; there are jobs. Create it with: " in said
    assert "heapline topic create jbos" in said


@pytest.mark.parametrize(("typed", "code"), [("y\n", 0), ("YES\n", 0), ("n\n", 1), ("\n", 1), ("x\n", 1), ("", 1)])
def test_question_leaves_no_trace_in_the_output(cli: Cli, typed: str, code: int) -> None:
    cli("topic", "create", "old")
    result = cli("topic", "delete", "old", typed=typed, code=code)
    assert "Permanently delete" in result.stderr
    assert result.stdout == ("topic old deleted\n" if code == 0 else "")
    assert cli("topic", "show", "old", code=1 - code)


def test_show_has_the_last_audit(cli: Cli, clock: HandClock) -> None:
    cli("topic", "create", "jobs")
    assert "last audit" not in cli("topic", "show", "jobs").stdout
    until = datetime.fromtimestamp(clock.wall_ms() / 1000, UTC)
    asyncio.run(cli.broker.record_audit("jobs", until, 1200))
    shown = cli("topic", "show", "jobs").stdout
    assert f"0 lost, 0 doubled, 0 early; 1 200 messages, up to {until:%Y-%m-%d %H:%M:%S}Z" in shown
    found = {"lost": 2, "early": 1, "refuted": ["none_lost", "[red]\x1b"], "topics": 3}
    asyncio.run(cli.broker.record_audit("jobs", until, 1200, **found))
    shown = " ".join(cli("topic", "show", "jobs").stdout.replace("│", " ").split())
    assert "2 lost, 0 doubled, 1 early; broken: none_lost, [red]" in shown
    assert "with 2 other topics" in shown
    assert "\x1b" not in shown
    (printed,) = cli.json("topic", "show", "jobs")
    assert printed["stats"]["log"]["audit"]["lost"] == 2
