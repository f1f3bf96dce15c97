"""Secrets are compared in constant time: by `hmac.compare_digest`, or by Argon2 itself."""

from __future__ import annotations

import hmac

import pytest

from heapline.contract.errors import ConfirmationNeeded, Unauthenticated
from heapline.server.auth.principals import LOCAL
from heapline.server.gate import Confirmations
from heapline.testing.clock import FakeClock
from tests.unit.server.auth.rig import Rig


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    results: list[bool] = []
    compare = hmac.compare_digest

    def spy(a: bytes, b: bytes) -> bool:
        results.append(compare(a, b))
        return results[-1]

    monkeypatch.setattr(hmac, "compare_digest", spy)
    return results


async def test_known_key_is_compared_by_its_digest_in_constant_time(compared: list[bool]) -> None:
    rig = Rig()
    _, key = rig.key()
    await rig.guard.authenticate(key)
    compared.clear()
    rig.hasher.verified.clear()
    await rig.guard.authenticate(key)
    assert compared == [True]
    assert rig.hasher.verified == []  # only this comparison admitted it
    compared.clear()
    with pytest.raises(Unauthenticated):
        await rig.guard.authenticate(key[:-1] + ("A" if key[-1] != "A" else "B"))
    assert compared
    assert not any(compared)


async def test_confirmation_is_compared_in_constant_time(compared: list[bool]) -> None:
    confirmations = Confirmations(FakeClock(), b"secret")
    with pytest.raises(ConfirmationNeeded) as needed:
        confirmations.require(None, LOCAL, "Purge", "jobs")
    token = needed.value.token
    with pytest.raises(ConfirmationNeeded):
        confirmations.require(token, LOCAL, "Purge", "other")
    confirmations.require(token, LOCAL, "Purge", "jobs")
    assert compared == [False, True]
