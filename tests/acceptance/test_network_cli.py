"""Network commands against one real server: each in both outputs, typed as a newcomer would."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import heapline
from heapline.cli import main
from tests.integration.server_process import Process

pytestmark = pytest.mark.slow


class Home:
    """A newcomer's directory, with a server on ./data and free ports."""

    def __init__(self, path: Path, target: str) -> None:
        self.path, self.target = path, target
        self.environment = {
            "COLUMNS": "100", "HEAPLINE_URL": target, "HEAPLINE_DATA": str(path / "data"), "HEAPLINE_API_KEY_FILE": "",
        }  # fmt: skip

    def __call__(self, *arguments: str, typed: str | bytes = "", code: int = 0, **environment: str) -> Any:
        result = CliRunner().invoke(main.app, list(arguments), input=typed, env=self.environment | environment)
        assert result.exit_code == code, result.output + repr(result.exception)
        return result

    def json(self, *arguments: str, typed: str | bytes = "", code: int = 0) -> list[Any]:
        return [json.loads(line) for line in self(*arguments, "--json", typed=typed, code=code).stdout.splitlines()]

    def shell(self, command: str, **options: Any) -> subprocess.Popen[bytes]:
        """Run a line in a real shell, in which `heapline` is a function. The key is found in ./data."""
        source = str(Path(heapline.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": source, "HEAPLINE_URL": self.target, "COLUMNS": "80"}
        script = f'heapline() {{ "{sys.executable}" -m heapline "$@"; }}; {command}'
        return subprocess.Popen(
            ["bash", "-c", script], cwd=self.path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            **options,
        )  # fmt: skip

    def bury(self, topic: str, reason: str) -> str:
        """Bury the best message of a topic and return its id."""

        async def work() -> str:
            key = (self.path / "data" / "admin.key").read_text().strip()
            async with heapline.connect(self.target, api_key=key) as hl:
                (message,) = await hl.pop(topic)
                await message.bury(reason=reason)
                return message.message_id

        return asyncio.run(work())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    path = tmp_path_factory.mktemp("home")
    with asyncio.Runner() as runner:
        process = Process(path / "data")
        runner.run(process.__aenter__())
        yield Home(path, process.target)
        runner.run(process.kill())


@pytest.fixture
def topic(home: Home, request: pytest.FixtureRequest) -> str:
    """Create a topic for one test."""
    name = re.sub(r"\W+", "-", request.node.name)[:100]
    home("topic", "create", name, "--segment-bytes", "1MiB")
    return name


def test_newcomer_enqueues_and_pops_a_message(home: Home) -> None:
    line = (
        "heapline topic create tour && echo urgent | heapline put tour -p 1 && "
        "heapline pop tour --ack --json | head -1; heapline pop tour; echo exit $?"
    )
    out, err = (reported.decode() for reported in home.shell(line).communicate(timeout=120))
    created, hint, put, popped, code = out.splitlines()
    assert created == "topic tour is ready: smallest priority first, leases of 30s, 1 partition"
    assert hint.endswith("heapline put tour hello")
    assert json.loads(popped)["message_id"] in put
    assert json.loads(popped)["payload_text"] == "urgent\n"
    assert (code, err) == ("exit 3", "no message is ready in tour: it is empty\n")


def test_killed_and_repeated_import_enqueues_each_line_once(home: Home, topic: str) -> None:
    total = 3000
    lines = [json.dumps({"n": n}).encode() + b"\n" for n in range(total)]
    (home.path / "lines.jsonl").write_bytes(b"".join(lines))
    command = f"put {topic} --idempotency-key import --batch 50"
    first = home.shell(f"exec {sys.executable} -m heapline {command} --file -", stdin=subprocess.PIPE)
    assert first.stdin is not None
    first.stdin.write(b"".join(lines[:1230]))
    first.stdin.flush()
    deadline = time.monotonic() + 60
    while home.json("topic", "show", topic)[0]["stats"]["ready"] < 1000:
        assert time.monotonic() < deadline
    first.kill()
    first.communicate(timeout=60)
    (reported,) = home.json(*command.split(), "--file", str(home.path / "lines.jsonl"))
    assert reported["enqueued"] + reported["duplicates"] == reported["lines"] == total
    assert 1000 <= reported["duplicates"] <= 1230
    popped = home.json("pop", topic, "--max", str(total + 1), "--ack")
    assert [json.loads(message["payload_text"])["n"] for message in popped] == list(range(total))


def test_topic_is_created_shown_changed_and_deleted(home: Home) -> None:
    flags = ["--mode", "max", "--partitions", "2", "--backoff-base", "5s", "--partition-weight", "1=3"]
    (made,) = home.json("topic", "create", "shop/mail", *flags)
    assert (made["topic"], made["config"]["mode"], made["config"]["backoff"]["base"]) == ("shop/mail", "max", 5.0)
    assert made["config"]["partition_weights"] == {"1": 3.0}
    assert "backoff_base" in home("topic", "update", "shop/mail", "--backoff-base", "1m").stdout
    (shown,) = home.json("topic", "show", "shop/mail")
    assert (shown["config"]["backoff"]["base"], shown["config"]["backoff"]["factor"]) == (60.0, 2.0)
    assert shown["stats"]["partitions"][1]["partition"] == 1
    assert "partition" in home("topic", "show", "shop/mail").stdout
    assert "mode of a topic cannot be changed" in home("topic", "update", "shop/mail", "--mode", "min", code=1).stderr
    assert "k must be an integer from 1 to" in home("topic", "update", "shop/mail", "--k", "0", code=1).stderr
    assert "shop/mail" in home("topic", "list").stdout
    home("topic", "delete", "shop/mail", typed="n\n", code=1)
    home("topic", "delete", "shop/mail", "--yes")
    assert "shop/mail" not in [reported["topic"] for reported in home.json("topic", "list")]


def test_messages_are_put_and_popped_in_both_outputs(home: Home, topic: str) -> None:
    (put,) = home.json("put", topic, "hello", "-p", "3", "--key", "k", "-H", "a=b", "--idempotency-key", "x")
    assert "was already enqueued" in home("put", topic, "hello", "--idempotency-key", "x").stdout
    home("put", topic, typed=b"\xff\x00")
    text = next(reported for reported in home.json("peek", topic) if reported["id"] == put["id"])
    assert (text["payload_text"], text["headers"], text["key"]) == ("hello", {"a": "b"}, "k")
    assert "not text: ff 00" in home("peek", topic).stdout
    home("pop", topic, "--ack", "--wait", "10s")
    assert "not acked; redelivered after that" in home("pop", topic, "--visibility", "1h", "--holder", "me").stderr
    (got,) = home.json("get", topic, put["message_id"])
    assert (got["state"], got["holder"], got["attempts"]) == ("leased", "me", 1)
    assert "leased until" in home("get", topic, put["id"]).stdout
    assert home.json("pop", topic, code=3) == []


def test_dead_letters_are_listed_replayed_and_deleted(home: Home, topic: str) -> None:
    home("put", topic, "--file", "-", typed="1\n2\n3\n")
    ids = [home.bury(topic, f"reason {number}") for number in range(3)]
    assert [reported["message_id"] for reported in home.json("dlq", "list", topic)] == ids
    assert "reason 1" in home("dlq", "list", topic, "--died-after", "1h").stdout
    assert "1 dead letter replayed" in home("dlq", "replay", topic, ids[0]).stdout
    assert home.json("dlq", "replay", topic, "--reason", "REASON 1", "--rate", "100") == [{"count": 1}]
    assert (
        "Permanently delete all 1 dead letter of" in home("dlq", "delete", topic, "--all", typed="n\n", code=1).stderr
    )
    assert home.json("dlq", "delete", topic, "--all", "--yes") == [{"count": 1}]
    assert home.json("dlq", "list", topic) == []


@pytest.mark.parametrize(
    "command",
    ["topic show nix", "topic update nix --k 2", "topic delete nix -y", "put nix x", "peek nix", "pop nix", "get nix 1",
     "dlq list nix", "dlq replay nix --all", "dlq delete nix --all -y", "topic pause nix", "topic resume nix",
     "topic purge nix -y", "cancel nix 1", "reschedule nix 1 -p 3"],
)  # fmt: skip
def test_unknown_topic_is_refused_with_how_to_create_it(home: Home, command: str) -> None:
    said = home(*command.split(), code=1).stderr
    assert said.startswith("TopicNotFound: topic 'nix' does not exist")
    assert "heapline topic create nix" in said


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("put {} x --max-retries 251", "max_retries must be an integer from 0 to 250"),
        ("put {} x --fairness-key a", "has no fairness keys"),
        ("peek {} -n 0", "limit"),
        ("pop {} --visibility 0", "visibility"),
        ("get {} nonsense", "is not a message id"),
        ("get {} 1", "MessageNotFound"),
        ("dlq replay {}", "select dead letters by id"),
        ("dlq replay {} --all --rate 0", "rate must be a number over 0"),
        ("topic create {}", "TopicExists"),
        ("topic create a/b/c", "BadName"),
    ],
)
def test_bad_input_is_refused_with_the_contract_s_message(home: Home, topic: str, command: str, said: str) -> None:
    result = home(*command.format(topic).split(), code=1)
    assert said in result.stderr
    assert result.stdout == ""


def test_key_decides_what_a_command_may_do(home: Home, topic: str) -> None:
    secret = home("keys", "create", "--name", "p", "--scope", f"{topic}:produce", "--data", str(home.path / "data"))
    file = home.path / f"{topic}.key"
    file.write_text(secret.stdout)
    home("put", topic, "x", "--key-file", str(file))
    refused = home("pop", topic, "--key-file", str(file), code=1).stderr
    assert "PermissionDenied" in refused
    assert f"'{topic}:consume'" in refused
    assert "?" in home("topic", "list", "--key-file", str(file)).stdout  # only consumers may read statistics
    assert secret.stdout.strip() not in refused


def test_command_without_a_valid_key_lists_the_searched_places(home: Home, tmp_path: Path) -> None:
    said = home("topic", "list", code=1, HEAPLINE_DATA=str(tmp_path)).stderr
    assert "needs an API key, and none was found" in said
    assert f"{str(tmp_path / 'admin.key')!r} cannot be read" in said
    (tmp_path / "bad.key").write_text("hl_0000000000000000_nothing")
    said = home("topic", "list", "--key-file", str(tmp_path / "bad.key"), code=1).stderr
    assert "rejects the key in" in said
    assert "nothing\n" not in said


def test_commands_speak_tls(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    home = Home(tmp_path, "")
    home("certs", "dev", str(certs))
    tls = ("--tls-certificate", str(certs / "server.crt"), "--tls-key", str(certs / "server.key"))
    with asyncio.Runner() as runner:
        process = Process(tmp_path / "data", *tls)
        runner.run(process.__aenter__())
        to = ("--to", process.target)
        home("topic", "create", "jobs", *to, "--ca", str(certs / "ca.crt"))
        assert "TLS" in home("topic", "list", *to, "--timeout", "1s", code=1).stderr
        runner.run(process.kill())
