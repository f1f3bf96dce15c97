"""Confirmation tokens are valid for one call, once, for a short time."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from heapline.contract.errors import ConfirmationNeeded
from heapline.server.auth import LOCAL, Principal
from heapline.server.gate import VALID_FOR_MS, Confirmations
from heapline.testing.clock import FakeClock

ADA = Principal("user:ada@example.org", ())
SECRET = b"of the server"


def ask(confirmations: Confirmations, *call: Any, who: Principal = ADA) -> str:
    with pytest.raises(ConfirmationNeeded) as caught:
        confirmations.require(None, who, *call)
    return caught.value.token


def is_refused(confirmations: Confirmations, token: str, *call: Any, who: Principal = ADA) -> bool:
    try:
        confirmations.require(token, who, *call)
    except ConfirmationNeeded as error:
        return error.token != token
    return False


def test_call_runs_with_its_confirmation_token() -> None:
    confirmations = Confirmations(FakeClock(), SECRET)
    assert not is_refused(confirmations, ask(confirmations, "purge", "jobs"), "purge", "jobs")


def test_confirmation_token_is_valid_once() -> None:
    confirmations = Confirmations(FakeClock(), SECRET)
    token = ask(confirmations, "purge", "jobs")
    assert not is_refused(confirmations, token, "purge", "jobs")
    assert is_refused(confirmations, token, "purge", "jobs")


def test_token_expires() -> None:
    clock = FakeClock()
    confirmations = Confirmations(clock, SECRET)
    token, late = ask(confirmations, "purge", "jobs"), ask(confirmations, "purge", "jobs")
    clock.advance(VALID_FOR_MS / 1000 - 0.001)
    assert not is_refused(confirmations, token, "purge", "jobs")
    clock.advance(0.001)
    assert is_refused(confirmations, late, "purge", "jobs")


def test_used_tokens_are_forgotten_when_they_have_expired() -> None:
    clock = FakeClock()
    confirmations = Confirmations(clock, SECRET)
    for _ in range(5):
        confirmations.require(ask(confirmations, "purge", "jobs"), ADA, "purge", "jobs")
        clock.advance(61)
    assert len(confirmations._used) == 1


@pytest.mark.parametrize(
    ("call", "who"),
    [
        (("purge", "jobs"), LOCAL),
        (("delete", "jobs"), ADA),
        (("purge", "other"), ADA),
        (("purge", "jobs", b"dead letters"), ADA),
        (("purgej", "obs"), ADA),
    ],
)
def test_token_is_bound_to_caller_call_and_topic(call: tuple[Any, ...], who: Principal) -> None:
    confirmations = Confirmations(FakeClock(), SECRET)
    token = ask(confirmations, "purge", "jobs")
    assert is_refused(confirmations, token, *call, who=who)
    assert not is_refused(confirmations, token, "purge", "jobs")  # a wrong call does not use it up


def test_any_process_with_the_secret_accepts_the_token_and_no_other_does() -> None:
    clock = FakeClock()
    token = ask(Confirmations(clock, SECRET), "purge", "jobs")
    assert not is_refused(Confirmations(clock, SECRET), token, "purge", "jobs")
    assert is_refused(Confirmations(clock, b"another"), token, "purge", "jobs")


def test_token_issued_too_far_in_the_future_is_refused() -> None:
    ahead, clock = FakeClock(), FakeClock()
    ahead.advance(10)
    token = ask(Confirmations(ahead, SECRET), "purge", "jobs")
    assert is_refused(Confirmations(clock, SECRET), token, "purge", "jobs")


@pytest.mark.parametrize("at", range(56))
def test_token_with_any_byte_changed_is_refused(at: int) -> None:
    confirmations = Confirmations(FakeClock(), SECRET)
    raw = bytearray(base64.urlsafe_b64decode(ask(confirmations, "purge", "jobs")))
    raw[at] ^= 1
    assert is_refused(confirmations, base64.urlsafe_b64encode(raw).decode(), "purge", "jobs")


@pytest.mark.parametrize("token", ["", "x", "é", "A" * 75, "A" * 76, "!" * 76])
def test_garbage_token_is_refused(token: str) -> None:
    assert is_refused(Confirmations(FakeClock(), SECRET), token, "purge", "jobs")
