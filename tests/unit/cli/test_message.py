"""`heapline put`, `peek`, `pop`, `get`, `cancel`, `reschedule` and `dlq`, on an in-memory broker."""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heapline.cli import output, put_file
from heapline.cli.output import interruptible
from heapline.contract.errors import UnavailableError
from heapline.contract.inspection import TopicSeries
from heapline.testing import HandClock
from tests.unit.cli.memory_cli import Cli, make_cli

NOT_TEXT = b"\x00\xff\x1b[31m"


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, clock: HandClock) -> Cli:
    cli = make_cli(monkeypatch, clock)
    cli("topic", "create", "jobs")
    return cli


def bury(cli: Cli, reason: str) -> str:
    """Bury the best message and return its id."""

    async def work() -> str:
        (message,) = await cli.broker.pop("jobs")
        await message.bury(reason=reason)
        return message.message_id

    return asyncio.run(work())


def payloads(cli: Cli) -> list[bytes]:
    return [message.payload or b"" for message in cli.broker.standing("jobs")]


# -- put ---------------------------------------------------------------------------------------------------------------


def test_put_message_has_every_given_option(cli: Cli) -> None:
    (printed,) = cli.json(
        "put", "jobs", "hello", "-p", "-7", "--key", "k1", "-H", "trace=a=b", "--header", "x=y", "--delay", "1m",
        "--ttl", "1h", "--max-retries", "2", "--idempotency-key", "once",
    )  # fmt: skip
    (message,) = cli.broker.standing("jobs")
    assert (printed["message_id"], printed["duplicate"]) == (message.message_id, False)
    assert (message.payload, message.priority, message.key, message.state) == (b"hello", -7, "k1", "delayed")
    assert message.headers == {"trace": "a=b", "x": "y"}
    assert message.due_at is not None
    assert message.enqueued_at is not None
    assert 60 <= (message.due_at - message.enqueued_at).total_seconds() <= 60.1  # due times are rounded to timer ticks


def test_put_at_a_time_delays_the_message(cli: Cli) -> None:
    cli("put", "jobs", "later", "--at", "2100-01-01T00:00:00+01:00")
    (message,) = cli.broker.standing("jobs")
    assert message.due_at is not None
    assert message.due_at.isoformat() == "2099-12-31T23:00:00+00:00"


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_put_without_payload_takes_stdin_to_the_last_byte(cli: Cli, arguments: list[str]) -> None:
    cli("put", "jobs", *arguments, typed=NOT_TEXT + b"\n")
    assert payloads(cli) == [NOT_TEXT + b"\n"]


def test_put_prints_the_id_and_recognizes_a_duplicate(cli: Cli) -> None:
    first = cli("put", "jobs", "x", "--idempotency-key", "a").stdout
    (id,) = [message.message_id for message in cli.broker.standing("jobs")]
    assert first == f"message {id} enqueued in jobs\n"
    assert cli("put", "jobs", "x", "--idempotency-key", "a").stdout == f"message {id} was already enqueued\n"
    assert len(payloads(cli)) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["x", "--delay", "1s", "--at", "2100-01-01T00:00:00Z"], 1, "give delay or deliver_at, not both"),
        (["x", "--header", "novalue"], 2, "NAME=VALUE"),
        (["x", "--idempotency-scope", "window"], 1, "needs an idempotency_key"),
        (["x", "--priority", str(1 << 63)], 1, "priority must be an integer from -2^63 to 2^63-1"),
        (["x", "--max-retries", "251"], 1, "max_retries must be an integer from 0 to 250"),
        (["x", "--at", "tomorrow"], 2, "is not a time"),
        (["x", "--file", "y"], 1, "exclude each other"),
        (["x", "--messages"], 1, "--file"),
        ([], 1, "stdin is empty"),
        (["--file", "nowhere.jsonl"], 1, "cannot read the file 'nowhere.jsonl': No such file"),
        (["--file", "."], 1, "cannot read the file"),
    ],
)
def test_bad_put_is_refused_and_changes_nothing(cli: Cli, arguments: list[str], code: int, said: str) -> None:
    assert said in " ".join(cli("put", "jobs", *arguments, code=code).stderr.split())
    assert payloads(cli) == []


def test_put_into_an_unknown_topic_says_how_to_create_it(cli: Cli) -> None:
    assert "Create it with: heapline topic create nix" in cli("put", "nix", "x", code=1).stderr
    assert "Create it with: heapline topic create nix" in cli("put", "nix", "--file", "-", typed="{}\n", code=1).stderr


# -- put --file --------------------------------------------------------------------------------------------------------


def lines(tmp_path: Path, *content: Any) -> str:
    file = tmp_path / "lines.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in content))
    return str(file)


def test_each_line_of_a_file_is_a_payload_as_it_is_written(cli: Cli, tmp_path: Path) -> None:
    file = lines(tmp_path, '{"a":  1}', "", "[2]", ' "three" ', "4")
    assert cli("put", "jobs", "--file", file, "-p", "3", "--batch", "2").stdout == "jobs: 4 messages enqueued\n"
    assert payloads(cli) == [b'{"a":  1}', b"[2]", b'"three"', b"4"]
    assert {message.priority for message in cli.broker.standing("jobs")} == {3}


def test_file_may_come_from_stdin(cli: Cli) -> None:
    (printed,) = cli.json("put", "jobs", "-f", "-", typed="1\n2")
    assert printed == {"lines": 2, "enqueued": 2, "duplicates": 0, "refused": 0, "errors": []}
    assert payloads(cli) == [b"1", b"2"]


def test_interrupted_import_can_be_repeated_without_duplicates(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("put", "jobs", "--file", lines(tmp_path, *range(5)), "--batch", "2", "--idempotency-key", "monday")
    enqueue_batch, calls = cli.broker.enqueue_batch, iter(range(100))

    async def broken(*args: Any, **options: Any) -> Any:
        if next(calls) == 1:
            raise UnavailableError("the server has gone")
        return await enqueue_batch(*args, **options)

    monkeypatch.setattr(cli.broker, "enqueue_batch", broken)
    said = cli(*command, code=1).stderr
    assert "interrupted: at least 2 messages enqueued. Run it again with the same --idempotency-key" in said
    assert "UnavailableError: the server has gone" in said
    assert cli(*command).stdout == "jobs: 3 messages enqueued, 2 already enqueued before\n"
    assert payloads(cli) == [b"0", b"1", b"2", b"3", b"4"]


@pytest.fixture
def own_sigint() -> Iterator[None]:
    """Restore Python's own SIGINT handler, which other tests may have replaced."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("own_sigint")
def test_import_stopped_by_ctrl_c_says_how_many_were_enqueued(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue_batch, calls = cli.broker.enqueue_batch, iter(range(100))

    async def stopped(*args: Any, **options: Any) -> Any:
        if next(calls) == 1:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)
        return await enqueue_batch(*args, **options)

    monkeypatch.setattr(cli.broker, "enqueue_batch", stopped)
    result = cli("put", "jobs", "--file", lines(tmp_path, *range(5)), "--batch", "2", code=130)
    assert "interrupted: at least 2 messages enqueued. With --idempotency-key NAME" in result.stderr


@pytest.mark.usefixtures("own_sigint")
def test_ctrl_c_ends_a_read_that_blocks_inside_the_loop() -> None:
    async def read() -> None:
        with interruptible():
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the read went on")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(read())


def test_refused_lines_are_reported_by_number_and_the_others_enqueued(cli: Cli, tmp_path: Path) -> None:
    cli("topic", "update", "jobs", "--max-payload-bytes", "20")
    file = lines(tmp_path, 1, "{secret", {"long": "x" * 30}, "", 5)
    result = cli("put", "jobs", "--file", file, code=1)
    assert "line 2: not JSON" in result.stderr
    assert (
        "line 3: a payload of 42 bytes for topic 'jobs' is over the limit of 20 (the topic's max_payload_bytes)"
        in result.stderr
    )
    assert "secret" not in result.output
    assert result.stdout == "jobs: 2 messages enqueued, 2 refused\n"
    assert payloads(cli) == [b"1", b"5"]
    (printed,) = cli.json("put", "jobs", "--file", file, code=1)
    assert [(error["line"], error["error"]) for error in printed["errors"]] == [
        (2, "BadRequest"),
        (3, "PayloadTooLarge"),
    ]


def test_import_stops_after_too_many_refused_lines(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put_file, "REFUSED_MAX", 15)
    file = lines(tmp_path, *["no, json"] * 40, 1)
    said = cli("put", "jobs", "--file", file, "--batch", "5", code=1).stderr
    assert "and 5 more lines were refused" in said
    assert "15 lines were refused; is this the right file?" in said
    assert payloads(cli) == []


def test_lines_can_be_complete_messages(cli: Cli, tmp_path: Path) -> None:
    file = lines(
        tmp_path, {"payload_json": {"a": 1}, "priority": 2, "headers": {"h": "v"}},
        {"payload_text": "text", "priority": 1, "delay": 5}, {"payload": base64.b64encode(NOT_TEXT).decode()},
    )  # fmt: skip
    cli("put", "jobs", "--file", file, "--messages", "--idempotency-key", "m")
    found = [(m.payload, m.priority, m.state, m.headers) for m in cli.broker.standing("jobs")]
    assert found == [
        (b'{"a": 1}', 2, "ready", {"h": "v"}), (b"text", 1, "delayed", {}), (NOT_TEXT, 0, "ready", {})
    ]  # fmt: skip
    assert "3 already enqueued before" in cli("put", "jobs", "-f", file, "--messages", "--idempotency-key", "m").stdout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"payload_text": "a", "payload_json": 1}, "give exactly one of"),
        ({"payload_text": "a", "prio": 1}, "unknown field `prio`"),
        ({"payload_text": "a", "delay": "5 s"}, "`$.delay`"),
        ([1], "not a message"),
        ({"payload_text": "a", "max_retries": 999}, "max_retries"),
    ],
)
def test_malformed_line_is_rejected(cli: Cli, tmp_path: Path, line: Any, said: str) -> None:
    result = cli("put", "jobs", "--file", lines(tmp_path, line), "--messages", code=1)
    assert "line 1: " in result.stderr
    assert said in result.stderr
    assert payloads(cli) == []


def test_complete_messages_refuse_message_options(cli: Cli) -> None:
    said = cli("put", "jobs", "-f", "-", "--messages", "-p", "3", "--ttl", "1s", typed="{}\n", code=1).stderr
    assert "omit priority, ttl" in said


# -- history -----------------------------------------------------------------------------------------------------------


def test_history_shows_what_happened(cli: Cli) -> None:
    (printed,) = cli.json("put", "jobs", "x", "-p", "3")
    id = bury(cli, "[red]broken")
    assert id == printed["message_id"]
    events = cli.json("history", "jobs", id)
    assert [event["kind"] for event in events] == ["enqueued", "leased", "dead_lettered"]
    assert (events[0]["priority"], events[2]["reason"]) == (3, "[red]broken")
    shown = cli("history", "jobs", id).stdout
    assert "because '[red]broken'" in shown
    assert "delivery 1" in shown


# -- dead letters by reason, and due times -----------------------------------------------------------------------------


def test_dead_letters_are_grouped_and_counted(cli: Cli, clock: HandClock) -> None:
    assert cli("dlq", "groups", "jobs").stdout == "jobs has no dead letters\n"
    for n in range(3):
        cli("put", "jobs", "x")
        bury(cli, f"[red]timeout after {n} s")
    clock.advance(1)
    (group,) = cli.json("dlq", "groups", "jobs")
    assert (group["reason"], group["count"], group["match"]) == ("[red]timeout after # s", 3, "[red]timeout after")
    assert "[red]timeout after # s" in cli("dlq", "groups", "jobs").stdout
    (counted,) = cli.json("dlq", "count", "jobs", "--reason", "TIMEOUT")
    cli("put", "jobs", "x")
    bury(cli, "timeout again")
    assert "--died-before" in cli("dlq", "count", "jobs").stdout
    pinned = ("--reason", "timeout", "--died-before", counted["as_of"])
    assert cli.json("dlq", "delete", "jobs", *pinned, "--yes") == [{"count": counted["count"]}] == [{"count": 3}]


def test_due_times_are_shown(cli: Cli) -> None:
    assert cli("topic", "due", "jobs").stdout == "nothing is delayed in jobs\n"
    cli("put", "jobs", "x", "--delay", "90s")
    cli("put", "jobs", "x", "--delay", "30d")
    (printed,) = cli.json("topic", "due", "jobs")
    assert [span["count"] for span in printed["hour"][:3]] == [0, 1, 0]
    assert printed["later"] == 1
    assert "1 later" in cli("topic", "due", "jobs").stdout


# -- search ------------------------------------------------------------------------------------------------------------


def test_search_shows_where_the_text_is(cli: Cli) -> None:
    for n in range(3):
        cli("put", "jobs", f"order [red]{n}", "-H", f"n={n}")
    assert len(cli.json("search", "jobs", "ORDER")) == 3
    (row,) = cli.json("search", "jobs", "order", "--header", "n=1")
    assert (row["where"], row["excerpt"]) == ("payload", "order [red]1")
    assert "order [red]1" in cli("search", "jobs", "-H", "n=1", "order").stdout
    assert cli("search", "jobs", "absent").stdout == "no message matches\n"
    assert len(cli.json("search", "jobs", "order", "-n", "2")) == 2
    assert "give a TEXT, --key or --header" in cli("search", "jobs", code=1).stderr


# -- series ------------------------------------------------------------------------------------------------------------


def test_broker_without_series_says_so(cli: Cli) -> None:
    assert "keeps no series" in cli("series", "jobs", code=1).stderr
    assert cli.json("series")[0]["times"] == []


def test_series_are_shown_as_rates(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    depths = {"ready": [1000], "delayed": [0], "leased": [7], "dead": [0]}
    sums = {"enqueued": [500], "done": [25], "failed": [0], "oldest_wait": [90]}
    found = TopicSeries(topic="jobs", interval=10, times=[1_900_000_000], seconds=[10], **depths, **sums)

    async def stats_series(topic: str | None, since: object) -> TopicSeries:
        return found

    monkeypatch.setattr(cli.broker, "stats_series", stats_series)
    shown = cli("series", "jobs").stdout
    for cell in (output.count(1000), "50", "2.5", "1m30s"):
        assert f" {cell} " in shown, shown


# -- leases ------------------------------------------------------------------------------------------------------------


def test_leases_are_listed_and_ended(cli: Cli) -> None:
    assert cli("lease", "list", "jobs").stdout == "nothing is leased in jobs\n"
    assert cli("lease", "holders").stdout == "no message was leased in the last hour\n"
    for text in ("a", "b"):
        cli("put", "jobs", text)
    cli("pop", "jobs", "-n", "2", "--holder", "[red]w")
    first, second = cli.json("lease", "list", "jobs")
    assert (first["holder"], first["attempts"]) == ("[red]w", 1)
    assert not {"token", "lease_token"} & first.keys()
    assert "[red]w" in cli("lease", "list", "jobs", "--holder", "[red]w").stdout
    assert cli.json("lease", "end", "jobs", first["message_id"], "--reason", "hangs") == [{"count": 1}]
    assert [row["message_id"] for row in cli.json("lease", "list", "jobs")] == [second["message_id"]]
    (worker,) = cli.json("lease", "holders")
    assert (worker["topic"], worker["holder"], worker["leases"]) == ("jobs", "[red]w", 1)
    assert "[red]w" in cli("lease", "holders").stdout


# -- peek --------------------------------------------------------------------------------------------------------------


def test_peek_shows_the_next_ones_best_first_and_changes_nothing(cli: Cli) -> None:
    for priority, text in ((5, "later"), (1, "first"), (3, "second")):
        cli("put", "jobs", text, "-p", str(priority))
    printed = cli.json("peek", "jobs", "--limit", "2")
    assert [(t["payload_text"], t["priority"], t["state"], t["attempts"]) for t in printed] == [
        ("first", 1, "ready", 0), ("second", 3, "ready", 0)
    ]  # fmt: skip
    shown = cli("peek", "jobs").stdout
    assert shown.index("first") < shown.index("second") < shown.index("later")
    assert {message.state for message in cli.broker.standing("jobs")} == {"ready"}


def test_table_at_80_columns_cuts_payloads_and_never_ids(cli: Cli) -> None:
    cli.columns = 80
    cli("put", "jobs", "[red]" + "x" * 500)
    (message,) = cli.broker.standing("jobs")
    shown = cli("peek", "jobs").stdout
    assert message.message_id in shown
    assert "[red]xxx" in shown  # foreign text is not markup
    assert len(shown.splitlines()) == 5


def test_peek_explains_an_empty_result(cli: Cli) -> None:
    assert cli("peek", "jobs").stdout == "no message is ready in jobs: it is empty\n"
    cli("put", "jobs", "x", "--delay", "1h")
    assert cli("peek", "jobs").stdout == "no message is ready in jobs (1 delayed)\n"
    assert cli("peek", "jobs", "--json").stdout == ""


def test_explain_shows_why_messages_are_next_and_what_holds_them_back(cli: Cli) -> None:
    assert cli("explain", "jobs").stdout == "no message is ready in jobs: it is empty\n"
    for priority in (5, 1):
        cli("put", "jobs", "secret", "-p", str(priority))
    first, second = cli.json("explain", "jobs")
    assert (first["line"], first["message"]["priority"], second["line"]) == (1, 1, 2)
    assert "because its priority is worse" in second["text"]
    cli("topic", "pause", "jobs")
    shown = cli("explain", "jobs", second["message"]["message_id"])
    assert "Second in line: priority 5" in shown.stdout
    assert "The topic is paused. It holds back up to 2." in shown.stderr
    assert "secret" not in shown.stdout


@pytest.mark.parametrize("limit", ["0", "10001"])
def test_bad_limit_of_a_peek_is_refused(cli: Cli, limit: str) -> None:
    assert "limit" in cli("peek", "jobs", "-n", limit, code=1).stderr


# -- pop ---------------------------------------------------------------------------------------------------------------


def test_pop_leases_a_message_and_says_when_it_is_redelivered(cli: Cli, clock: HandClock) -> None:
    cli("put", "jobs", "hello", "--key", "k", "-H", "trace=1")
    result = cli("pop", "jobs", "--visibility", "1m")
    (message,) = cli.broker.standing("jobs")
    for text in (message.message_id, "delivery 1", "key k", "trace: 1", "\nhello\n"):
        assert text in result.stdout
    assert "1 message leased until" in result.stderr
    assert "not acked; redelivered after that" in result.stderr
    assert message.state == "leased"
    clock.advance(60)
    cli("peek", "jobs")  # the lease has ended, and the backoff starts
    clock.advance(2)
    (printed,) = cli.json("pop", "jobs")
    assert printed["attempts"] == 2


def test_popped_and_acked_message_is_removed(cli: Cli) -> None:
    cli("put", "jobs", "hello")
    result = cli("pop", "jobs", "--ack")
    assert "1 message acked and removed from the topic" in result.stderr
    assert cli.broker.standing("jobs") == []


def test_message_is_acked_only_after_it_was_shown(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("put", "jobs", "hello")

    def full(out: Any, messages: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("heapline.cli.message.print_messages", full)
    cli("pop", "jobs", "--ack", "--json", code=1)
    assert [message.state for message in cli.broker.standing("jobs")] == ["ready"], "released"


def test_pop_json_has_every_field_of_the_http_api(cli: Cli) -> None:
    cli("put", "jobs", "-p", "4", "-H", "a=b", typed=NOT_TEXT)
    cli("put", "jobs", "text \x9b", "-p", "5")
    raw = cli("pop", "jobs", "--max", "9", "--json").stdout
    assert "\x9b" not in raw
    binary, text = map(json.loads, raw.splitlines())
    assert base64.b64decode(binary["payload"]) == NOT_TEXT
    assert "payload_text" not in binary
    assert (text["payload_text"], "payload" in text) == ("text \x9b", False)
    assert (binary["priority"], binary["attempts"], binary["headers"], binary["partition"]) == (4, 1, {"a": "b"}, 0)
    assert {"message_id", "id", "lease_token", "enqueued_at", "deadline"} <= binary.keys()


def test_binary_payload_cannot_move_the_cursor(cli: Cli) -> None:
    cli("put", "jobs", "a\x1b[31mb\tc\nd")
    cli("put", "jobs", typed=NOT_TEXT)
    for command in (["peek", "jobs"], ["pop", "jobs", "-n", "2"]):
        shown = cli(*command).stdout
        assert "\x1b" not in shown
        assert r"a\x1b[31mb" in shown
        assert "not text: 00 ff 1b" in shown


def test_pop_of_many_returns_all_available_messages(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heapline.cli.message.POP_MAX", 2)
    cli("put", "jobs", "-f", "-", typed="1\n2\n3\n4\n5\n")
    assert [printed["payload_text"] for printed in cli.json("pop", "jobs", "-n", "3", "--ack")] == ["1", "2", "3"]
    assert len(cli.json("pop", "jobs", "-n", "9", "--ack")) == 2


def test_pop_without_messages_has_exit_code_3_and_says_why(cli: Cli) -> None:
    result = cli("pop", "jobs", code=3)
    assert (result.stdout, result.stderr) == ("", "no message is ready in jobs: it is empty\n")
    assert cli("pop", "jobs", "--json", code=3).output == ""
    assert "code 3" in cli("pop", "--help").stdout


@pytest.mark.parametrize(("flags", "code"), [(["--max", "0"], 2), (["--wait", "x"], 2), (["--visibility", "0"], 1)])
def test_bad_pop_is_refused(cli: Cli, flags: list[str], code: int) -> None:
    cli("put", "jobs", "x")
    cli("pop", "jobs", *flags, code=code)
    assert [message.state for message in cli.broker.standing("jobs")] == ["ready"]


# -- get ---------------------------------------------------------------------------------------------------------------


def test_get_shows_every_field_of_a_message(cli: Cli) -> None:
    (put,) = cli.json("put", "jobs", "hello", "-p", "7", "--key", "k", "-H", "trace=1", "--delay", "1h")
    for spelled in (put["message_id"], put["id"]):
        shown = cli("get", "jobs", spelled).stdout
        for text in (put["message_id"], "delayed", "(in ", "header trace", "hello"):
            assert text in shown
    (printed,) = cli.json("get", "jobs", put["id"])
    assert (printed["state"], printed["priority"], printed["key"], printed["headers"]) == (
        "delayed",
        7,
        "k",
        {"trace": "1"},
    )


@pytest.mark.parametrize(("id", "said"), [("nonsense", "is not a message id"), ("12", "MessageNotFound")])
def test_get_of_an_unknown_message_is_refused(cli: Cli, id: str, said: str) -> None:
    assert said in cli("get", "jobs", id, code=1).stderr


# -- cancel and reschedule ---------------------------------------------------------------------------------------------


def test_cancel_removes_waiting_messages(cli: Cli) -> None:
    ids = [cli.json("put", "jobs", text, "--delay", "1h")[0]["message_id"] for text in ("a", "b", "c")]
    assert cli("cancel", "jobs", ids[0]).stdout == f"message {ids[0]} cancelled\n"
    assert cli.json("cancel", "jobs", ids[1], ids[1]) == [{"message_id": ids[1], "cancelled": True}]
    assert payloads(cli) == [b"c"]


def test_cancel_reports_every_message_that_cannot_be_cancelled(cli: Cli) -> None:
    (kept,) = cli.json("put", "jobs", "leased", "-p", "-1")
    (gone,) = cli.json("put", "jobs", "waiting", "--delay", "1h")
    cli("pop", "jobs")
    result = cli("cancel", "jobs", kept["message_id"], "12", gone["message_id"], code=1)
    assert result.stdout == f"message {gone['message_id']} cancelled\n"
    assert "MessageNotFound" in result.stderr
    assert "is leased to a worker" in result.stderr
    assert "Traceback" not in result.stderr
    assert [message.state for message in cli.broker.standing("jobs")] == ["leased"]


def test_reschedule_changes_due_time_and_priority(cli: Cli) -> None:
    (put,) = cli.json("put", "jobs", "x", "--delay", "1h", "-p", "5")
    id = put["message_id"]
    assert cli("reschedule", "jobs", id, "--at", "2100-01-01T00:00:00Z").stdout == f"message {id} rescheduled\n"
    (message,) = cli.broker.standing("jobs")
    assert message.due_at is not None
    assert (message.due_at.year, message.priority) == (2100, 5)
    assert cli.json("reschedule", "jobs", id, "-p", "-3", "--delay", "0s") == [{"message_id": id, "rescheduled": True}]
    (message,) = cli.broker.standing("jobs")
    assert (message.state, message.priority) == ("ready", -3)


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ([], 1, "use --delay, --at or --priority"),
        (["--delay", "1s", "--at", "2100-01-01T00:00:00Z"], 1, "exclude each other"),
        (["--delay", "-5s"], 2, "'-5s' is not a duration"),
        (["--at", "tomorrow"], 2, "is not a time"),
    ],
)
def test_bad_reschedule_is_refused(cli: Cli, flags: list[str], code: int, said: str) -> None:
    (put,) = cli.json("put", "jobs", "x", "--delay", "1h")
    result = cli("reschedule", "jobs", put["message_id"], *flags, code=code)
    assert said in " ".join(result.stderr.replace("│", " ").split())


# -- dlq ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dead(cli: Cli) -> list[str]:
    """Create three dead letters and return their ids."""
    cli("put", "jobs", "-f", "-", typed="1\n2\n3\n")
    return [bury(cli, reason) for reason in ("Timeout after 5 s", "no [address]", "timeout again")]


def test_dead_letters_are_listed_with_their_reasons(cli: Cli, dead: list[str]) -> None:
    printed = cli.json("dlq", "list", "jobs")
    assert [(t["message_id"], t["reason"]) for t in printed] == list(
        zip(dead, ("Timeout after 5 s", "no [address]", "timeout again"), strict=True)
    )
    shown = cli("dlq", "list", "jobs").stdout
    assert "no [address]" in shown
    assert all(id in shown for id in dead)
    assert "there may be more" in cli("dlq", "list", "jobs", "-n", "2").stdout
    assert len(cli.json("dlq", "list", "jobs", "--reason", "TIMEOUT")) == 2
    assert len(cli.json("dlq", "list", "jobs", "--died-after", "1h", "--priority-max", "0")) == 3
    assert "has no matching dead letters" in cli("dlq", "list", "jobs", "--key", "none").stdout


def test_dead_letters_are_replayed_by_id_by_reason_or_all(cli: Cli, dead: list[str]) -> None:
    assert cli("dlq", "replay", "jobs", dead[1]).stdout == "1 dead letter replayed into jobs\n"
    assert cli.json("dlq", "replay", "jobs", "--reason", "again") == [{"count": 1}]
    assert cli("dlq", "replay", "jobs", "--all", "--rate", "5").stdout == "1 dead letter replayed into jobs\n"
    assert "jobs has no dead letters" in cli("dlq", "list", "jobs").stdout


def test_dlq_replay_counts_ids_without_a_dead_letter(cli: Cli, dead: list[str]) -> None:
    printed = cli("dlq", "replay", "jobs", dead[0], dead[0], dead[1])
    assert printed.stdout == "2 dead letters replayed into jobs\n"
    again = cli("dlq", "replay", "jobs", dead[0], dead[2], code=1)
    assert again.stdout == "1 dead letter replayed into jobs\n", "the other one is replayed"
    assert "1 of the 2 ids are not dead letters of jobs" in again.stderr
    unknown = cli("dlq", "replay", "jobs", dead[0], "--json", code=1)
    assert (unknown.stdout, "1 of the 1 ids" in unknown.stderr) == ('{"count":0}\n', True)
    cli("dlq", "replay", "jobs", dead[0], "--reason", "another")  # a filter may exclude some
    cli("dlq", "replay", "jobs", "--all")


def test_dlq_delete_asks_with_the_number_of_dead_letters(cli: Cli, dead: list[str]) -> None:
    choices = {"1 dead letter": [dead[0]], "2 dead letters": ["--reason", "timeout"], "all 3": ["--all"]}
    for said, choice in choices.items():
        refused = cli("dlq", "delete", "jobs", *choice, typed="n\n", code=1)
        assert f"Permanently delete {said}" in refused.stderr
    assert len(cli.json("dlq", "list", "jobs")) == 3
    done = cli("dlq", "delete", "jobs", "--reason", "timeout", typed="y\n")
    assert done.stdout.endswith("2 dead letters of jobs deleted\n")
    assert cli.json("dlq", "delete", "jobs", "--all", "--yes") == [{"count": 1}]


@pytest.mark.parametrize("verb", ["replay", "delete"])
def test_dead_letters_must_be_selected(cli: Cli, dead: list[str], verb: str) -> None:
    assert "select dead letters by id" in cli("dlq", verb, "jobs", code=1).stderr
    assert "--all selects all dead letters" in cli("dlq", verb, "jobs", "--all", "--reason", "x", code=1).stderr
    assert "is not a message id" in cli("dlq", verb, "jobs", "nonsense", *(["-y"] * (verb == "delete")), code=1).stderr
    assert len(cli.json("dlq", "list", "jobs")) == 3


def test_bad_rate_is_refused(cli: Cli, dead: list[str]) -> None:
    assert "rate must be a number over 0" in cli("dlq", "replay", "jobs", "--all", "--rate", "0", code=1).stderr


# -- where the words go ------------------------------------------------------------------------------------------------


def test_terminal_without_utf8_gets_escaped_characters(cli: Cli) -> None:
    cli("put", "jobs", "k\u00e4se \U0001f9c0 \u2026")
    cli.charset = "ascii"
    (printed,) = cli.json("peek", "jobs")
    assert printed["payload_text"] == "k\u00e4se \U0001f9c0 \u2026", "JSON stays JSON, and the same"
    assert "k\\xe4se" in cli("peek", "jobs").stdout
    assert "k\\xe4se" in cli("pop", "jobs", "--ack").stdout
    assert payloads(cli) == []


class FullDisk(io.TextIOWrapper):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_pop_releases_messages_that_it_could_not_print(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("put", "jobs", "a")
    cli("put", "jobs", "b")
    monkeypatch.setattr(output, "print_json", FullDisk(io.BytesIO()).write)
    result = cli("pop", "jobs", "-n", "2", "--ack", "--json", code=1)
    assert "the output is incomplete, because it could not be written: No space left on device" in result.stderr
    assert "Traceback" not in result.stderr
    monkeypatch.undo()
    assert [(m.payload, m.state, m.attempts) for m in cli.broker.standing("jobs")] == [
        (b"a", "ready", 0), (b"b", "ready", 0),
    ]  # fmt: skip
