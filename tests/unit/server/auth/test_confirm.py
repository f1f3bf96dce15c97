"""Confirmation tokens are good for one call, once, soon."""

from __future__ import annotations

import base64

import pytest

from heapline.errors import ConfirmationNeeded
from heapline.server.auth import LOCAL, Confirmations, Principal
from heapline.server.auth.confirm import GOOD_FOR_MS
from heapline.testing.clock import FakeClock

ADA = Principal("user:ada@example.org", ())


def ask(confirmations: Confirmations, *call: str, who: Principal = ADA) -> str:
    with pytest.raises(ConfirmationNeeded) as caught:
        confirmations.require(None, who, *call)
    return caught.value.token


def is_refused(confirmations: Confirmations, token: str, *call: str, who: Principal = ADA) -> bool:
    try:
        confirmations.require(token, who, *call)
    except ConfirmationNeeded as error:
        return error.token != token
    return False


def test_call_is_carried_out_with_its_token() -> None:
    confirmations = Confirmations(FakeClock())
    assert not is_refused(confirmations, ask(confirmations, "purge", "jobs"), "purge", "jobs")


def test_token_is_good_once() -> None:
    confirmations = Confirmations(FakeClock())
    token = ask(confirmations, "purge", "jobs")
    assert not is_refused(confirmations, token, "purge", "jobs")
    assert is_refused(confirmations, token, "purge", "jobs")


def test_token_runs_out() -> None:
    clock = FakeClock()
    confirmations = Confirmations(clock)
    token, late = ask(confirmations, "purge", "jobs"), ask(confirmations, "purge", "jobs")
    clock.advance(GOOD_FOR_MS / 1000 - 0.001)
    assert not is_refused(confirmations, token, "purge", "jobs")
    clock.advance(0.001)
    assert is_refused(confirmations, late, "purge", "jobs")


def test_used_tokens_are_forgotten_when_they_have_run_out() -> None:
    clock = FakeClock()
    confirmations = Confirmations(clock)
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
        (("purge", "jobs", "dead letters"), ADA),
        (("purgej", "obs"), ADA),
    ],
)
def test_token_is_bound_to_who_what_and_where(call: tuple[str, ...], who: Principal) -> None:
    confirmations = Confirmations(FakeClock())
    token = ask(confirmations, "purge", "jobs")
    assert is_refused(confirmations, token, *call, who=who)
    assert not is_refused(confirmations, token, "purge", "jobs")  # a wrong try does not use it up


def test_token_of_another_process_is_refused() -> None:
    clock = FakeClock()
    assert is_refused(Confirmations(clock), ask(Confirmations(clock), "purge", "jobs"), "purge", "jobs")


@pytest.mark.parametrize("at", range(56))
def test_token_with_any_byte_changed_is_refused(at: int) -> None:
    confirmations = Confirmations(FakeClock())
    raw = bytearray(base64.urlsafe_b64decode(ask(confirmations, "purge", "jobs")))
    raw[at] ^= 1
    assert is_refused(confirmations, base64.urlsafe_b64encode(raw).decode(), "purge", "jobs")


@pytest.mark.parametrize("token", ["", "x", "é", "A" * 75, "A" * 76, "!" * 76])
def test_garbage_is_refused(token: str) -> None:
    assert is_refused(Confirmations(FakeClock()), token, "purge", "jobs")
