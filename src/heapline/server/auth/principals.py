"""Principals and their scopes: who calls and what they may do. `Guard` is the seam to whatever knows keys and people.

A scope is a pattern over `namespace/topic` and the rights granted there, written `orders/*:produce,consume`. A star
matches any part of a name, but never the slash. A pattern without a slash is in the default namespace, as a topic's
name is. `*` alone matches every topic of every namespace. Rights do not include one another: an administrator who
also produces needs both. Nothing here knows how a caller proves their identity.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Protocol

import msgspec

from heapline.contract.call import Right
from heapline.contract.config import DEFAULT_NAMESPACE
from heapline.contract.errors import BadRequest, PermissionDenied

TOPIC_MAX = 300
EVERYTHING = frozenset(Right)
_PART = re.compile(r"[A-Za-z0-9._*-]{1,128}\Z")


class Scope(msgspec.Struct, frozen=True):
    pattern: str
    rights: frozenset[Right]

    def __str__(self) -> str:
        return f"{self.pattern}:{','.join(right.value for right in Right if right in self.rights)}"

    def covers(self, topic: str | None) -> bool:
        """Return whether the scope applies to this topic. None means all topics that exist or will exist."""
        namespace, name = _split(self.pattern)
        if topic is None:
            return not (namespace.strip("*") or name.strip("*"))
        wanted_namespace, wanted = _split(topic)
        return fnmatchcase(wanted_namespace, namespace) and fnmatchcase(wanted, name)


@lru_cache(4096)  # checked on every call
def _grants(scopes: tuple[Scope, ...], right: Right | None, topic: str | None) -> bool:
    return any((right is None or right in scope.rights) and scope.covers(topic) for scope in scopes)


def _split(name: str) -> tuple[str, str]:
    if name == "*":
        return "*", "*"
    namespace, slash, rest = name.partition("/")
    return (namespace, rest) if slash else (DEFAULT_NAMESPACE, name)


def parse_scope(text: str) -> Scope:
    """Read a scope from its text.

    >>> str(parse_scope("orders/*:consume,produce"))
    'orders/*:produce,consume'
    """
    pattern, colon, listed = text.strip().rpartition(":")
    if not colon or not all(_PART.match(part) for part in _split(pattern)):
        raise BadRequest(
            f"{text!r} is not a scope; write PATTERN:RIGHTS, such as 'orders/*:produce,consume', 'jobs:consume' or "
            "'*:produce,consume,admin' (a star matches any part of a name)"
        )
    try:
        rights = frozenset(Right(right.strip()) for right in listed.split(","))
    except ValueError:
        raise BadRequest(f"{listed!r} in scope {text!r} is not valid; the rights are produce, consume, admin") from None
    return Scope(pattern, rights)


class Principal(msgspec.Struct, frozen=True):
    """A caller and their rights. Only a guard creates principals."""

    subject: str  # "key:<id>", "user:<email>", "local"
    scopes: tuple[Scope, ...]
    issued_at: int = 0  # these two: of a token or a browser session, in wall ms
    expires_at: int | None = None
    token_epoch: int = 0  # of the token's user; any change to the user raises it

    def may(self, right: Right | None, topic: str | None) -> bool:
        """Return whether the principal has this right on this topic. Right None: any right. Topic None: all topics."""
        if topic is not None and len(topic) > TOPIC_MAX:  # not a valid name, and too long to keep in the cache
            return _grants.__wrapped__(self.scopes, right, topic)
        return _grants(self.scopes, right, topic)

    def check(self, right: Right | None, topic: str | None) -> None:
        """Raise PermissionDenied unless the principal has this right on this topic; None as in `may`."""
        if not self.may(right, topic):
            raise PermissionDenied(self.subject, (right or Right.CONSUME).value, topic or "")


ALL_SCOPES = (Scope("*", EVERYTHING),)
ANONYMOUS = Principal("unknown", ())  # a caller that is not authenticated; has no rights
LOCAL = Principal("local", ALL_SCOPES)


class Guard(Protocol):
    """Authenticates callers. Their rights are in the principals that it returns."""

    async def authenticate(self, credential: str | None) -> Principal:
        """Return who sent this credential (`Bearer …` or an API key). Raise Unauthenticated if it is not valid."""

    def is_valid(self, principal: Principal) -> bool:
        """Return False once the key is revoked, the token has expired, or the scopes have changed.

        Raise UnavailableError if that cannot be determined now.
        """

    def principal(self, subject: str) -> Principal | None:
        """Return the principal that this subject has now, or None if it is unknown, revoked or disabled."""

    def secret(self, purpose: str) -> bytes:
        """Return a secret of 32 bytes for this purpose. Processes that share the keys share the secret."""


def check_included(principal: Principal, scopes: Iterable[Scope]) -> None:
    """Raise PermissionDenied if these scopes grant anything that the principal's own scopes do not.

    A pattern is included in another one that matches its text, stars included. Unions of scopes are not considered.
    """
    for scope in scopes:
        for right in scope.rights:
            if not principal.may(right, None if scope.pattern == "*" else scope.pattern):
                raise PermissionDenied(principal.subject, right.value, scope.pattern)


def derive_secret(secret: bytes, purpose: str) -> bytes:
    return hmac.digest(secret, purpose.encode(), hashlib.sha256)


class NoAuthGuard:
    """The guard of a server without authentication, for tests: every caller is the local administrator."""

    _secret = secrets.token_bytes(32)

    async def authenticate(self, credential: str | None) -> Principal:
        return LOCAL

    def is_valid(self, principal: Principal) -> bool:
        return True

    def principal(self, subject: str) -> Principal | None:
        return LOCAL if subject == LOCAL.subject else None

    def secret(self, purpose: str) -> bytes:
        return derive_secret(self._secret, purpose)
