"""Who calls, and what they may do: the seam between the faces of the server and whatever knows keys and people.

A scope is a pattern over `namespace/topic` and the actions allowed there, written `orders/*:produce,consume`. A star
stands for any part of a name and never for the slash; a pattern without a slash is in the default namespace, as a
topic's name would be; `*` alone is every topic of every namespace. Actions do not include one another: an
administrator who should also produce has both. Nothing here knows how a caller proves who he is.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Protocol

import msgspec

from heapline.config import DEFAULT_NAMESPACE
from heapline.errors import BadRequest, PermissionDenied

TOPIC_MAX = 300
_PART = re.compile(r"[A-Za-z0-9._*-]{1,128}\Z")


class Action(enum.Enum):
    PRODUCE = "produce"
    CONSUME = "consume"
    ADMIN = "admin"


EVERYTHING = frozenset(Action)


class Scope(msgspec.Struct, frozen=True):
    pattern: str
    actions: frozenset[Action]

    def __str__(self) -> str:
        return f"{self.pattern}:{','.join(action.value for action in Action if action in self.actions)}"

    def covers(self, topic: str | None) -> bool:
        """Whether it holds for this topic; None asks for all topics there are or will be."""
        if topic is not None and len(topic) > TOPIC_MAX:
            return _covers.__wrapped__(self.pattern, topic)  # no name of a topic, and too much to remember
        return _covers(self.pattern, topic)


@lru_cache(4096)  # asked on every call
def _covers(pattern: str, topic: str | None) -> bool:
    namespace, name = _split(pattern)
    if topic is None:
        return not (namespace.strip("*") or name.strip("*"))
    wanted_namespace, wanted = _split(topic)
    return fnmatchcase(wanted_namespace, namespace) and fnmatchcase(wanted, name)


def _split(name: str) -> tuple[str, str]:
    if name == "*":
        return "*", "*"
    namespace, slash, rest = name.partition("/")
    return (namespace, rest) if slash else (DEFAULT_NAMESPACE, name)


def parse_scope(text: str) -> Scope:
    """
    >>> str(parse_scope("orders/*:consume,produce"))
    'orders/*:produce,consume'
    """
    pattern, colon, listed = text.strip().rpartition(":")
    if not colon or not all(_PART.match(part) for part in _split(pattern)):
        raise BadRequest(
            f"{text!r} is not a scope: write PATTERN:ACTIONS, such as 'orders/*:produce,consume', 'jobs:consume' or "
            "'*:produce,consume,admin' (a star stands for any part of a name)"
        )
    try:
        actions = frozenset(Action(action.strip()) for action in listed.split(","))
    except ValueError:
        raise BadRequest(f"{listed!r} in scope {text!r}: the actions are produce, consume and admin") from None
    return Scope(pattern, actions)


class Principal(msgspec.Struct, frozen=True):
    """Who calls. Given out by a guard alone; the last two are how it knows a token's end and its user's changes."""

    subject: str  # "key:<id>", "user:<email>", "local"
    scopes: tuple[Scope, ...]
    expires_at: int | None = None  # wall ms
    token_epoch: int = 0

    def may(self, action: Action, topic: str | None) -> bool:
        return any(action in scope.actions and scope.covers(topic) for scope in self.scopes)


ALL_SCOPES = (Scope("*", EVERYTHING),)
LOCAL = Principal("local", ALL_SCOPES)


class Guard(Protocol):
    async def authenticate(self, credential: str | None) -> Principal:
        """`Bearer …` or an API key; raises Unauthenticated."""

    def check(self, principal: Principal, action: Action, topic: str | None) -> None:
        """Raises PermissionDenied. A topic of None is the action on all of them."""

    def is_valid(self, principal: Principal) -> bool:
        """Asked again on long streams: false once the key was revoked, the token ran out, or its scopes changed."""


def check_scopes(principal: Principal, action: Action, topic: str | None) -> None:
    if not principal.may(action, topic):
        raise PermissionDenied(principal.subject, action.value, topic or "")


def must_include(principal: Principal, scopes: Iterable[Scope]) -> None:
    """Raises PermissionDenied if these scopes allow anything that the principal's own do not: nobody gives more than he
    has. A pattern is inside another if that one matches its text, stars and all; a union of several is not looked at.
    """
    for scope in scopes:
        for action in scope.actions:
            if not principal.may(action, None if scope.pattern == "*" else scope.pattern):
                raise PermissionDenied(principal.subject, action.value, scope.pattern)


class Everybody:
    """The guard of a server without locks, for tests: whoever calls is the local administrator."""

    async def authenticate(self, credential: str | None) -> Principal:
        return LOCAL

    def check(self, principal: Principal, action: Action, topic: str | None) -> None:
        check_scopes(principal, action, topic)

    def is_valid(self, principal: Principal) -> bool:
        return True
