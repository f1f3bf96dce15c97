"""People: email, password and scopes; and the short-lived tokens that replace a password until they expire.

A token is a JWT signed with the directory's own secret (HS256; nothing else is accepted). It holds the user, the time
and the user's *epoch*, but no rights: scopes are looked up on every call. Disabling a user, a new password or new
scopes raise the epoch, which revokes all of that user's tokens. Time comes from the clock that is passed in. Email
addresses are compared without regard to case.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import jwt
import msgspec

from heapline.contract.errors import BadRequest, Unauthenticated
from heapline.server.auth.passwords import Allowance, Hasher, Prover, Throttle
from heapline.server.auth.principals import Principal, parse_scope
from heapline.server.auth.secret import Secret, SessionToken
from heapline.server.auth.store import AuthFile, AuthStore, UserRecord, parse_scopes

TOKEN_MS = 15 * 60_000
CLOCK_SKEW_MS = 60_000  # a token from further ahead was not issued here, or the clock was set back
PASSWORD_MIN, PASSWORD_MAX = 12, 1024
BY_EMAIL = Allowance(burst=5, refill_ms=30_000)
ALL_EMAILS = Allowance(burst=30, refill_ms=500)
ALGORITHM = "HS256"
VERIFIED_MAX = 10_000
CLAIMS = ("sub", "iat", "exp", "jti", "epoch")
LOGIN_REJECTED = "email or password is wrong, or the user is disabled"
TOKEN_REJECTED = "the token is not valid or has expired; log in again, or send an API key (hl_…)"
_EMAIL = re.compile(r"[^@\s<>\"',;:]{1,64}@[a-z0-9.-]{1,253}\Z")


def canonical_email(text: str) -> str:
    email = text.strip().casefold()
    if not _EMAIL.match(email) or not email.isprintable():
        raise BadRequest("email is not an address; write name@example.org")
    return email


class Users:
    """Changes to the list of users. They block on Argon2 and the disk."""

    def __init__(self, store: AuthStore, hasher: Hasher) -> None:
        self._store, self._hasher = store, hasher

    def add(self, email: str, password: Secret, scopes: Sequence[str]) -> UserRecord:
        email = canonical_email(email)
        record = UserRecord(
            email=email, hash=self._hash(password), scopes=_spelled(scopes), created_at=self._store.clock.wall_ms()
        )

        def edit(file: AuthFile) -> AuthFile:
            if email in file.users:
                raise BadRequest(f"user {email!r} already exists; see `heapline users password` and `users list`")
            return msgspec.structs.replace(file, users=file.users | {email: record})

        return self._store.change(edit).users[email]

    def list(self) -> list[UserRecord]:
        return sorted(self._store.refresh(now=True).users.values(), key=lambda record: record.email)

    def change(
        self,
        email: str,
        allowed: Callable[[UserRecord], None] = lambda record: None,
        *,
        password: Secret | None = None,
        scopes: Sequence[str] | None = None,
        disabled: bool | None = None,
    ) -> UserRecord:
        """Change a user in one step, which revokes that user's tokens. None leaves a property as it is.

        `allowed` receives the current record and raises if the change is not allowed.
        """
        email = canonical_email(email)
        changes: dict[str, object] = {}
        if password is not None:
            changes["hash"] = self._hash(password)
        if scopes is not None:
            changes["scopes"] = _spelled(scopes)
        if disabled is not None:
            changes["disabled_at"] = self._store.clock.wall_ms() if disabled else None

        def edit(file: AuthFile) -> AuthFile:
            record = file.users.get(email)
            if record is None:
                raise BadRequest(f"user {email!r} does not exist; see `heapline users list`")
            allowed(record)
            changed = msgspec.structs.replace(record, token_epoch=record.token_epoch + 1, **changes)
            return msgspec.structs.replace(file, users=file.users | {email: changed})

        return self._store.change(edit).users[email]

    def _hash(self, password: Secret) -> str:
        if not PASSWORD_MIN <= len(password.reveal()) <= PASSWORD_MAX:
            raise BadRequest(f"a password must have {PASSWORD_MIN} to {PASSWORD_MAX} characters")
        return self._hasher.hash(password.reveal())


def _spelled(scopes: Sequence[str]) -> tuple[str, ...]:
    if not scopes:
        raise BadRequest("a user needs at least one scope, such as '*:consume'")
    return tuple(str(parse_scope(scope)) for scope in scopes)


class Sessions:
    """Issues tokens for passwords and recognizes tokens, for a running server."""

    def __init__(self, store: AuthStore, hasher: Hasher, pool: Executor, token_ms: int = TOKEN_MS) -> None:
        self._store, self._token_ms = store, token_ms
        self._verified: OrderedDict[bytes, Principal] = OrderedDict()  # by digest of the token
        self._verified_by = store.file
        self._prover = Prover(hasher, Throttle(store.clock, BY_EMAIL, ALL_EMAILS), pool, "logins")

    async def login(self, email: str, password: Secret) -> SessionToken:
        """Return a token. A wrong password, an unknown and a disabled user get the same answer, at the same cost."""
        try:
            email = canonical_email(email)
        except BadRequest:
            raise Unauthenticated(LOGIN_REJECTED) from None
        if len(password.reveal()) > PASSWORD_MAX:
            raise Unauthenticated(LOGIN_REJECTED)
        if not await self._prover.prove(email, password.reveal(), lambda: self._hash_of(email), lambda: False):
            raise Unauthenticated(LOGIN_REJECTED)
        record = (await self._store.catch_up()).users.get(email)
        if record is None or record.disabled_at is not None:  # disabled while the hash was computed
            raise Unauthenticated(LOGIN_REJECTED)
        return self._token(record)

    async def _hash_of(self, email: str) -> str | None:
        record = (await self._store.catch_up()).users.get(email)
        return record.hash if record is not None and record.disabled_at is None else None

    def _token(self, record: UserRecord) -> SessionToken:
        claims = new_claims(record.email, record.token_epoch, self._store.clock.wall_ms(), self._token_ms)
        return SessionToken(sign(claims, bytes.fromhex(self._store.file.signing_secret)), claims.expires_at)

    def recognize(self, token: str) -> Principal:
        """Return the principal of a token.

        A verified token is known by its digest as long as the file of users does not change, so a change to the user
        ends it immediately. Its expiry is checked every time.
        """
        file, digest = self._store.refresh(), hashlib.sha256(token.encode()).digest()
        if self._verified_by is not file:
            self._verified.clear()
            self._verified_by = file
        principal = self._verified.get(digest)
        if principal is None:
            principal = self._verified[digest] = self._verify(token, file)
            if len(self._verified) > VERIFIED_MAX:
                self._verified.popitem(last=False)
        else:
            self._verified.move_to_end(digest)
        if not is_current(principal, self._store.clock.wall_ms()):
            self._verified.pop(digest, None)
            raise Unauthenticated(TOKEN_REJECTED)
        return principal

    def _verify(self, token: str, file: AuthFile) -> Principal:
        claims = read_token(token, bytes.fromhex(file.signing_secret), self._token_ms)
        principal = None if claims is None else self.principal_of(claims.subject)
        if claims is None or principal is None or principal.token_epoch != claims.epoch:
            raise Unauthenticated(TOKEN_REJECTED)
        return claims.apply_to(principal)

    def principal_of(self, email: str) -> Principal | None:
        """Return the principal of a user, or None if the user is unknown or disabled."""
        record = self._store.file.users.get(email)
        if record is None or record.disabled_at is not None:
            return None
        return Principal(f"user:{email}", parse_scopes(record), token_epoch=record.token_epoch)


# -- signed tokens -----------------------------------------------------------------------------------------------------


class Claims(msgspec.Struct, frozen=True):
    """The content of a signed token: who, when, and the epoch of the user, which must be current. Times in wall ms."""

    subject: str
    issued_at: int
    expires_at: int
    id: str
    epoch: int

    def apply_to(self, principal: Principal) -> Principal:
        return msgspec.structs.replace(principal, issued_at=self.issued_at, expires_at=self.expires_at)


def new_claims(subject: str, epoch: int, now: int, lifetime_ms: int) -> Claims:
    issued, expires = now // 1000 * 1000, (now + lifetime_ms) // 1000 * 1000
    return Claims(subject, issued, expires, secrets.token_urlsafe(12), epoch)


def sign(claims: Claims, secret: bytes) -> str:
    times = {"iat": claims.issued_at // 1000, "exp": claims.expires_at // 1000}
    body = {"sub": claims.subject, **times, "jti": claims.id, "epoch": claims.epoch}
    return jwt.encode(body, secret, algorithm=ALGORITHM)


def read_token(token: str, secret: bytes, lifetime_ms: int) -> Claims | None:
    """Return the claims, or None if the signature is wrong or the token lives longer than those issued now.

    Times are not compared with a clock: `is_current` does.
    """
    try:
        options: Any = {"require": list(CLAIMS), "verify_exp": False, "verify_iat": False, "verify_nbf": False}
        found = jwt.decode(token, secret, algorithms=[ALGORITHM], options=options)
    except jwt.PyJWTError:
        return None
    issued, expires, epoch = found["iat"], found["exp"], found["epoch"]
    if not all(type(value) is int for value in (issued, expires, epoch)):
        return None
    if expires - issued > -(-lifetime_ms // 1000):
        return None
    return Claims(found["sub"], issued * 1000, expires * 1000, found["jti"], epoch)


def is_current(principal: Principal, now: int) -> bool:
    """Return whether the principal's token is valid at this wall time. A token from ahead is not: see CLOCK_SKEW_MS."""
    return principal.expires_at is not None and principal.issued_at - CLOCK_SKEW_MS <= now < principal.expires_at
