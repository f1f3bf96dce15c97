"""Users and their tokens."""

from __future__ import annotations

import base64
import json
from typing import Any

import jwt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest, ResourceExhausted, Unauthenticated
from heapline.server.auth import users as users_module
from heapline.server.auth.principals import Principal, parse_scope
from heapline.server.auth.secret import Secret
from tests.unit.server.auth.rig import PASSWORD, Rig

EMAIL = "ada@example.org"


def with_user(*scopes: str) -> Rig:
    rig = Rig()
    rig.guard.users.add("Ada@Example.org", Secret(PASSWORD), scopes or ("orders/*:consume",))
    return rig


async def login(rig: Rig, password: str = PASSWORD, email: str = EMAIL) -> str:
    return (await rig.guard.login(email, Secret(password))).reveal()


async def refused(rig: Rig, token: str) -> None:
    with pytest.raises(Unauthenticated, match="log in again"):
        await rig.guard.authenticate(f"Bearer {token}")


def signed(rig: Rig, algorithm: str = "HS256", key: bytes | None = None, **changes: Any) -> str:
    """Return a token like ours, with changed claims; a claim of None is omitted."""
    now = rig.clock.wall_ms() // 1000
    claims = {"sub": EMAIL, "iat": now, "exp": now + 60, "jti": "x", "epoch": 1} | changes
    secret = key or bytes.fromhex(rig.guard.store.file.signing_secret)
    return jwt.encode({k: v for k, v in claims.items() if v is not None}, secret, algorithm=algorithm)


async def test_login_returns_a_token_of_the_user() -> None:
    rig = with_user()
    principal = await rig.guard.authenticate(f"Bearer {await login(rig, email=' ADA@example.ORG')}")
    assert principal.subject == f"user:{EMAIL}"
    assert principal.scopes == (parse_scope("orders/*:consume"),)
    assert rig.guard.is_valid(principal)


async def test_token_contains_user_and_times_but_no_rights() -> None:
    rig = with_user()
    claims = jwt.decode(await login(rig), options={"verify_signature": False})
    assert set(claims) == {"sub", "iat", "exp", "jti", "epoch"}
    assert claims["exp"] - claims["iat"] == users_module.TOKEN_MS // 1000
    assert claims["jti"] != jwt.decode(await login(rig), options={"verify_signature": False})["jti"]


async def test_token_expires_and_its_streams_end() -> None:
    rig = with_user()
    token = await login(rig)
    principal = await rig.guard.authenticate(token)
    rig.clock.advance(users_module.TOKEN_MS / 1000 - 1)
    assert await rig.guard.authenticate(token) == principal
    assert rig.guard.is_valid(principal)
    rig.clock.advance(1)
    await refused(rig, token)
    assert not rig.guard.is_valid(principal)


async def test_wrong_password_unknown_and_disabled_user_get_the_same_answer_at_the_same_cost() -> None:
    rig = with_user()
    rig.guard.users.add("out@example.org", Secret(PASSWORD), ["*:admin"])
    rig.guard.users.change("out@example.org", disabled=True)
    said = []
    for email, password in ((EMAIL, "wrong password"), ("nobody@example.org", PASSWORD), ("out@example.org", PASSWORD)):
        with pytest.raises(Unauthenticated) as caught:
            await login(rig, password, email)
        said.append(str(caught.value))
    assert len(set(said)) == 1
    assert len(rig.hasher.verified) == 3


async def test_password_attempts_are_limited_and_refilled_over_time() -> None:
    rig = with_user()
    for _ in range(100):
        with pytest.raises((Unauthenticated, ResourceExhausted)):
            await login(rig, "wrong password")
    assert len(rig.hasher.verified) == users_module.BY_EMAIL.burst
    with pytest.raises(ResourceExhausted):
        await login(rig)
    rig.clock.advance(users_module.BY_EMAIL.refill_ms / 1000)
    await login(rig)


async def test_guesses_over_many_emails_are_bounded() -> None:
    rig = with_user()
    for n in range(200):
        with pytest.raises((Unauthenticated, ResourceExhausted)):
            await login(rig, email=f"u{n}@example.org")
    assert len(rig.hasher.verified) == users_module.ALL_EMAILS.burst


async def test_overlong_password_costs_no_argon2() -> None:
    rig = with_user()
    with pytest.raises(Unauthenticated):
        await login(rig, "x" * 1_000_000)
    assert rig.hasher.verified == []


@pytest.mark.parametrize("change", ["disable", "password", "scopes"])
async def test_changing_a_user_revokes_their_tokens_and_ends_streams(change: str) -> None:
    rig = with_user()
    token = await login(rig)
    principal = await rig.guard.authenticate(token)
    users = rig.other_process().guard.users  # from the command line
    if change == "disable":
        users.change(EMAIL, disabled=True)
    elif change == "password":
        users.change(EMAIL, password=Secret("another password"))
    else:
        users.change(EMAIL, scopes=["*:produce"])
    rig.clock.advance(1)
    await refused(rig, token)
    assert not rig.guard.is_valid(principal)


async def test_enabling_a_user_again_does_not_restore_old_tokens() -> None:
    rig = with_user()
    token = await login(rig)
    rig.guard.users.change(EMAIL, disabled=True)
    rig.guard.users.change(EMAIL, disabled=False)
    await refused(rig, token)
    await rig.guard.authenticate(await login(rig))


async def test_user_disabled_during_argon2_gets_no_token() -> None:
    rig = with_user()
    verify = rig.hasher.verify

    def disable_meanwhile(stored: str, secret: str) -> bool:
        rig.guard.users.change(EMAIL, disabled=True)
        return verify(stored, secret)

    rig.hasher.verify = disable_meanwhile  # type: ignore[method-assign]
    with pytest.raises(Unauthenticated):
        await login(rig)


async def test_token_signed_with_the_secret_is_valid() -> None:
    """The control for the tests below, which each change one claim."""
    rig = with_user()
    await rig.guard.authenticate(signed(rig))


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": 1}, {"exp": None}, {"exp": "9999999999"}, {"iat": None}, {"iat": 9_999_999_999}, {"jti": None},
        {"sub": None}, {"sub": "nobody@example.org"}, {"epoch": 2}, {"epoch": None}, {"epoch": True}, {"epoch": "1"},
        {"key": b"k" * 32}, {"algorithm": "HS384"}, {"algorithm": "HS512"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
async def test_invalid_token_is_refused(changes: dict[str, Any]) -> None:
    rig = with_user()
    await refused(rig, signed(rig, **changes))


def _part(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "", "RS256", "ES256"])
async def test_token_that_names_another_algorithm_is_refused(algorithm: str) -> None:
    rig = with_user()
    _, body, signature = signed(rig).split(".")
    header = _part({"alg": algorithm, "typ": "JWT"})
    for tail in ("", signature):
        await refused(rig, f"{header}.{body}.{tail}")


async def test_token_with_another_body_under_its_signature_is_refused() -> None:
    rig = with_user()
    rig.guard.users.add("root@example.org", Secret(PASSWORD), ["*:admin"])
    header, _, signature = signed(rig).split(".")
    _, body, _ = signed(rig, sub="root@example.org").split(".")
    await refused(rig, f"{header}.{body}.{signature}")


@settings(max_examples=60)
@given(st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=200))
async def test_garbage_token_is_refused_without_side_effects(text: str) -> None:
    with pytest.raises(Unauthenticated):
        await GARBAGE.guard.authenticate(f"Bearer {text}")


GARBAGE = with_user()


@pytest.mark.parametrize("email", ["", "ada", "a@b@c", "a b@example.org", "<a>@example.org", "a\n@example.org"])
def test_malformed_email_is_refused(email: str) -> None:
    with pytest.raises(BadRequest):
        Rig().guard.users.add(email, Secret(PASSWORD), ["*:admin"])


def test_short_password_same_user_twice_and_no_scopes_are_refused() -> None:
    rig = with_user()
    with pytest.raises(BadRequest, match="12 to 1024"):
        rig.guard.users.add("b@example.org", Secret("short"), ["*:admin"])
    with pytest.raises(BadRequest, match="already"):
        rig.guard.users.add("ADA@example.org", Secret(PASSWORD), ["*:admin"])
    with pytest.raises(BadRequest, match="scope"):
        rig.guard.users.add("b@example.org", Secret(PASSWORD), [])
    with pytest.raises(BadRequest, match="does not exist"):
        rig.guard.users.change("b@example.org", disabled=True)
    assert [user.email for user in rig.guard.users.list()] == [EMAIL]


async def test_principal_of_another_guard_is_not_valid() -> None:
    rig = with_user()
    assert not rig.guard.is_valid(Principal("key:" + "0" * 16, ()))
    assert not rig.guard.is_valid(Principal(f"user:{EMAIL}", ()))
    assert not rig.guard.is_valid(Principal("somebody", ()))


async def test_token_is_verified_once_and_ends_when_its_user_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.guard.users.add("ada@example.org", Secret(PASSWORD), ["*:consume"])
    token = (await rig.guard.login("ada@example.org", Secret(PASSWORD))).reveal()
    decoded: list[str] = []
    decode = users_module.jwt.decode
    monkeypatch.setattr(
        users_module.jwt, "decode", lambda token, *a, **k: (decoded.append(token), decode(token, *a, **k))[1]
    )
    for _ in range(100):
        await rig.guard.authenticate(f"Bearer {token}")
    assert len(decoded) == 1
    rig.guard.users.change("ada@example.org", scopes=["*:produce"])
    with pytest.raises(Unauthenticated):
        await rig.guard.authenticate(f"Bearer {token}")


async def test_cached_token_expires() -> None:
    rig = Rig()
    rig.guard.users.add("ada@example.org", Secret(PASSWORD), ["*:consume"])
    token = (await rig.guard.login("ada@example.org", Secret(PASSWORD))).reveal()
    await rig.guard.authenticate(token)
    rig.clock.advance(users_module.TOKEN_MS / 1000)
    for _ in range(2):
        with pytest.raises(Unauthenticated):
            await rig.guard.authenticate(token)


async def test_token_cache_is_bounded_and_has_only_verified_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_module, "VERIFIED_MAX", 3)
    rig = Rig()
    rig.guard.users.add("ada@example.org", Secret(PASSWORD), ["*:consume"])
    for _ in range(5):
        await rig.guard.authenticate((await rig.guard.login("ada@example.org", Secret(PASSWORD))).reveal())
    for number in range(5):
        with pytest.raises(Unauthenticated):
            await rig.guard.authenticate(f"no.token.{number}")
    assert len(rig.guard._sessions._verified) == 3
