"""Secrets are in no repr, exception, log or answer; and the package's public names are those it lists."""

from __future__ import annotations

import logging
import pickle
import re
import traceback
from pathlib import Path

import pytest

from heapline.contract.errors import HeaplineError
from heapline.server import auth
from heapline.server.auth.secret import Secret, new_key
from heapline.server.auth.tls import PemParts
from tests.unit.server.auth.rig import DIRECTORY, PASSWORD, Rig


def test_secret_is_shown_only_by_reveal() -> None:
    secret = Secret("hush")
    for shown in (repr(secret), str(secret), f"{secret}", f"{secret!r:>20}", repr([secret]), repr({"a": secret})):
        assert "hush" not in shown
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    assert secret.reveal() == "hush"


def test_reprs_contain_no_hash_and_no_signing_secret() -> None:
    rig = Rig()
    rig.guard.users.add("ada@example.org", Secret(PASSWORD), ["*:admin"])
    file = rig.guard.store.file
    shown = repr([file, list(file.keys.values()), list(file.users.values()), rig.guard, PemParts(b"hush", b"", None)])
    assert "counted:" not in shown
    assert file.signing_secret not in shown
    assert "hush" not in shown


async def test_no_secret_in_exceptions_or_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rig = Rig()
    rig.guard.users.add("ada@example.org", Secret(PASSWORD), ["*:admin"])
    key_id, key = rig.key()
    token = (await rig.guard.login("ada@example.org", Secret(PASSWORD))).reveal()
    await rig.guard.authenticate(key)
    rig.guard.keys.revoke(key_id)
    rig.guard.users.change("ada@example.org", disabled=True)
    reported = []
    for credential in (key, token, token[:-2], new_key()[1].reveal(), key + "x", f"Bearer {key} {token}"):
        with pytest.raises(HeaplineError) as caught:
            await rig.guard.authenticate(credential)
        # Log it as a server would: the whole chain, without the source lines of this test.
        reported += [str(caught.value), repr(caught.value.facts()), repr(caught.value.__context__)]
    with pytest.raises(HeaplineError) as caught:
        rig.guard.keys.revoke(new_key()[1].reveal())
    reported += traceback.format_exception_only(caught.value)
    with pytest.raises(HeaplineError) as caught:
        await rig.guard.login("ada@example.org", Secret(PASSWORD + PASSWORD))
    reported += traceback.format_exception_only(caught.value)
    reported.append(caplog.text)
    everything = "\n".join(reported)
    for hidden in (key.split("_", 2)[2], token.split(".")[2], PASSWORD, rig.admin_key.split("_", 2)[2]):
        assert hidden not in everything
    assert "first admin key created" in caplog.text  # proves that the log was captured


async def test_no_secret_in_the_store() -> None:
    rig = Rig()
    _, key = rig.key()
    rig.guard.users.add("ada@example.org", Secret(PASSWORD), ["*:admin"])
    raw = rig.disk.read_file(f"{DIRECTORY}/auth.json").decode()
    assert key.split("_", 2)[2] not in raw
    assert rig.admin_key.split("_", 2)[2] not in raw
    assert PASSWORD not in raw


def test_keys_are_long_and_unique() -> None:
    keys = {new_key()[1].reveal() for _ in range(200)}
    assert len(keys) == 200
    assert {len(key.split("_", 2)[2]) for key in keys} == {43}  # 256 bits in base64


def test_public_names_exist() -> None:
    assert all(hasattr(auth, name) for name in auth.__all__)
    assert len(set(auth.__all__)) == len(auth.__all__)


def test_every_line_of_the_threat_model_names_a_test_that_exists() -> None:
    root = Path(__file__).parents[4]
    lines = (root / "docs" / "threat-model.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    named = [re.search(r"\[[UABI]\]\(\.\./(\S+)\) `(\w+)` \|$", row) for row in rows]
    assert len(named) > 20
    missing = [
        row
        for row, found in zip(rows, named, strict=True)
        if found is None or f"def {found[2]}(" not in (root / found[1]).read_text(encoding="utf-8")
    ]
    assert missing == []
