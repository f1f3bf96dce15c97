"""`heapline keys`, `users` and `certs` on real directories, even while a guard uses them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import heapline
from heapline.cli import main
from heapline.contract.errors import Unauthenticated
from heapline.server.auth import DirectoryGuard, Secret
from heapline.testing.clock import FakeClock

PASSWORD = "correct horse battery"


def cli(data: Path, *arguments: str, typed: str = "") -> Any:
    environment = {"COLUMNS": "200", "HEAPLINE_DATA": str(data)}
    return CliRunner().invoke(main.app, list(arguments), input=typed, env=environment)


def audit(data: Path) -> list[tuple[str, str, str]]:
    read = [json.loads(line) for line in (data / "audit.jsonl").read_text().splitlines()]
    return [(line["call"], line["about"], line["outcome"]) for line in read]


async def test_key_created_and_revoked_beside_a_running_server(tmp_path: Path) -> None:
    clock = FakeClock()
    guard = DirectoryGuard(tmp_path, clock=clock)
    made = cli(tmp_path, "keys", "create", "--name", "billing", "--scope", "orders/*:produce")
    assert made.exit_code == 0, made.stderr
    key = made.stdout.strip()
    principal = await guard.authenticate(key)
    assert [str(scope) for scope in principal.scopes] == ["orders/*:produce"]
    key_id = principal.subject.removeprefix("key:")
    assert cli(tmp_path, "keys", "revoke", key_id, "--yes").exit_code == 0
    clock.advance(1)
    assert not guard.is_valid(principal)
    with pytest.raises(Unauthenticated):
        await guard.authenticate(key)
    await guard.close()
    assert audit(tmp_path) == [("keys.create", key_id, "ok"), ("keys.revoke", key_id, "ok")]


def test_secret_of_a_key_is_printed_once_and_stored_nowhere(tmp_path: Path) -> None:
    made = cli(tmp_path, "keys", "create", "-n", "a", "-s", "*:consume")
    key = made.stdout.removesuffix("\n")
    assert key.startswith("hl_")
    assert "\n" not in key
    secret = key.split("_", 2)[2]
    shown = [cli(tmp_path, "keys", "list").output, cli(tmp_path, "keys", "list", "--json").output, made.stderr]
    shown += [path.read_text() for path in tmp_path.iterdir()]
    assert len(shown) == 6
    assert [text for text in shown if secret in text] == []


def test_list_shows_id_name_scopes_and_state(tmp_path: Path) -> None:
    for name in ("one", "two"):
        cli(tmp_path, "keys", "create", "-n", name, "-s", "*:consume", "-s", "jobs:produce")
    keys = [json.loads(line) for line in cli(tmp_path, "keys", "list", "--json").stdout.splitlines()]
    assert [(key["name"], key["scopes"], key["last_used_at"]) for key in keys] == [
        (name, ["*:consume", "jobs:produce"], None) for name in ("one", "two")
    ]
    cli(tmp_path, "keys", "revoke", keys[0]["id"], "--yes")
    table = cli(tmp_path, "keys", "list").stdout
    assert table.count("revoked") == 1
    assert table.count("valid") == 1


def test_mistakes_are_reported_and_audited(tmp_path: Path) -> None:
    bad = cli(tmp_path, "keys", "create", "-n", "a", "-s", "jobs")
    assert bad.exit_code == 1
    assert "is not a scope" in bad.stderr
    assert cli(tmp_path, "keys", "revoke", "nothing", "--yes").exit_code == 1
    assert "--data" in cli(tmp_path / "absent", "keys", "list").stderr
    assert audit(tmp_path) == [("keys.create", "", "BadRequest"), ("keys.revoke", "", "BadRequest")]


async def test_user_added_by_prompt_logs_in_until_disabled(tmp_path: Path) -> None:
    guard = DirectoryGuard(tmp_path, clock=(clock := FakeClock()))
    added = cli(tmp_path, "users", "add", "ada@example.org", "-s", "*:admin", typed=f"{PASSWORD}\n{PASSWORD}\n")
    assert added.exit_code == 0, added.output
    assert PASSWORD not in added.output
    token = (await guard.login("ada@example.org", Secret(PASSWORD))).reveal()
    await guard.authenticate(f"Bearer {token}")
    assert cli(tmp_path, "users", "disable", "ada@example.org", "--yes").exit_code == 0
    clock.advance(1)
    with pytest.raises(Unauthenticated):
        await guard.authenticate(f"Bearer {token}")
    assert "disabled" in cli(tmp_path, "users", "list").stdout
    assert cli(tmp_path, "users", "enable", "ada@example.org").exit_code == 0
    await guard.login("ada@example.org", Secret(PASSWORD))
    await guard.close()


@pytest.mark.parametrize("source", ["stdin", "file"])
async def test_password_comes_from_stdin_or_a_private_file(tmp_path: Path, source: str) -> None:
    data, file = tmp_path / "data", tmp_path / "password"
    data.mkdir()
    file.touch(mode=0o600)
    file.write_text("another password\n")
    name = "-" if source == "stdin" else str(file)
    scope = ("-s", "*:admin")
    cli(data, "users", "add", "ada@example.org", *scope, "--password-file", "-", typed=f"{PASSWORD}\n")
    changed = cli(data, "users", "password", "ada@example.org", "--password-file", name, typed="another password\n")
    assert changed.exit_code == 0, changed.output
    guard = DirectoryGuard(data)
    with pytest.raises(Unauthenticated):
        await guard.login("ada@example.org", Secret(PASSWORD))
    await guard.login("ada@example.org", Secret("another password"))
    await guard.close()


def test_scopes_of_a_user_are_replaced(tmp_path: Path) -> None:
    cli(tmp_path, "users", "add", "a@example.org", "-s", "*:admin", "--password-file", "-", typed=f"{PASSWORD}\n")
    assert cli(tmp_path, "users", "scopes", "A@example.org", "-s", "jobs:consume").exit_code == 0
    (user,) = [json.loads(line) for line in cli(tmp_path, "users", "list", "--json").stdout.splitlines()]
    assert user["scopes"] == ["jobs:consume"]


def test_keys_and_queue_share_one_directory(tmp_path: Path) -> None:
    cli(tmp_path, "keys", "create", "-n", "before", "-s", "*:consume")
    for _ in range(2):
        with heapline.open_sync(tmp_path, spare_segment_bytes=0) as hl:
            hl.create_topic("jobs", segment_bytes=1 << 20, max_payload_bytes=1 << 16)
            cli(tmp_path, "keys", "create", "-n", "beside", "-s", "*:consume")
    assert cli(tmp_path, "keys", "list", "--json").stdout.count("beside") == 2
    assert cli(tmp_path, "journal", "verify", str(tmp_path)).exit_code == 0


def test_password_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(PASSWORD)
    os.chmod(tmp_path / "password", 0o644)
    result = cli(
        tmp_path, "users", "add", "a@example.org", "-s", "*:admin", "--password-file", str(tmp_path / "password")
    )
    assert result.exit_code == 1
    assert "chmod 600" in result.stderr


@pytest.mark.parametrize("command", [("users", "add"), ("users", "password")])
def test_password_is_neither_argument_nor_option(tmp_path: Path, command: tuple[str, str]) -> None:
    for extra in (("--password", PASSWORD), (PASSWORD,)):
        assert cli(tmp_path, *command, "a@example.org", *extra).exit_code == 2


def test_certs_dev_creates_certificates_and_prints_their_paths(tmp_path: Path) -> None:
    made = cli(tmp_path, "certs", "dev", str(tmp_path / "certs"), "--host", "queue.internal")
    assert made.exit_code == 0
    assert sorted(map(Path, made.stdout.split())) == sorted((tmp_path / "certs").iterdir())
    assert cli(tmp_path, "certs", "dev", str(tmp_path / "certs")).exit_code == 1


@pytest.mark.parametrize(
    "command", ["keys create", "keys list", "keys revoke", "users add", "users list", "users disable", "users enable",
                "users password", "users scopes", "certs dev"],
)  # fmt: skip
def test_help_shows_an_example(tmp_path: Path, command: str) -> None:
    shown = cli(tmp_path, *command.split(), "--help").stdout
    assert f"Example:  heapline {command}" in shown


def test_command_whose_packages_are_missing_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'argon2'", name="argon2")

    monkeypatch.setattr(main.importlib, "import_module", absent)
    assert "heapline[server]" in cli(tmp_path, "keys", "--help").stdout
    result = cli(tmp_path, "keys", "create", "--name", "x")
    assert (result.exit_code, "pip install 'heapline[server]'" in result.stderr) == (1, True)
