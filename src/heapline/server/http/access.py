"""Keys and users over HTTP, for the dashboard: who may do what, in the administrator's hands.

Whoever changes them has `admin` on `*`, and cannot give more than he has: not in a new key, not to a user, and not by
setting the password of a user who may do more than himself. A key's secret stands in the answer that made it, and
nowhere else. A change ends at once what it takes away, streams included: before it is answered. Argon2 and the disk
are waited for in a thread. Nothing is ever deleted: a key is revoked, a user disabled, and their names stay taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from heapline.errors import BadRequest
from heapline.server.auth.guard import DirectoryGuard
from heapline.server.auth.principal import must_include, parse_scope
from heapline.server.auth.secret import Secret
from heapline.server.auth.store import KeyRecord, UserRecord, parse_scopes
from heapline.server.auth.users import canonical_email
from heapline.server.front import Caller
from heapline.server.http.openapi import documented
from heapline.server.http.visiting import Here, House

router = APIRouter(prefix="/v1", tags=["who may call"])
Scopes = Annotated[list[str], msgspec.Meta(min_length=1, max_length=100)]


class KeyAsk(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    scopes: Scopes


class UserAsk(msgspec.Struct, forbid_unknown_fields=True):
    email: str
    password: str
    scopes: Scopes


class UserChange(msgspec.Struct, forbid_unknown_fields=True):
    """What is given changes; each change ends the user's tokens."""

    password: str | None = None
    scopes: Scopes | None = None
    disabled: bool | None = None


class KeyTold(msgspec.Struct):
    """Everything but the secret, which nobody has any more."""

    id: str
    name: str
    scopes: list[str]
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


class UserTold(msgspec.Struct):
    email: str
    scopes: list[str]
    created_at: datetime
    disabled_at: datetime | None


class OneKey(msgspec.Struct):
    key: KeyTold


class NewKey(msgspec.Struct):
    key: KeyTold
    secret: Annotated[str, msgspec.Meta(description="the whole key; it is told here and nowhere else")]


class AllKeys(msgspec.Struct):
    keys: list[KeyTold]


class OneUser(msgspec.Struct):
    user: UserTold


class AllUsers(msgspec.Struct):
    users: list[UserTold]


# -- keys --------------------------------------------------------------------------------------------------------------


@documented(router, "GET", "/keys", tells=AllKeys, summary="List API keys")
async def list_keys(house: Here) -> Response:
    async with house.visit("ListKeys"):
        guard = _guard(house)
        records = await guard.aside(guard.keys.list)
        return _say({"keys": [_key(guard, record) for record in records]})


@documented(router, "POST", "/keys", asks=KeyAsk, tells=NewKey, status=201, summary="Make an API key")
async def create_key(house: Here) -> Response:
    async with house.asked("CreateKey", KeyAsk) as (body, caller):
        guard = _guard(house)
        _must_include(caller, body.scopes)
        record, secret = await guard.aside(lambda: guard.keys.create(body.name, body.scopes), caller.must_be_valid)
        caller.tell(about=record.id)
        return _say({"key": _key(guard, record), "secret": secret.reveal()}, 201)


@documented(router, "DELETE", "/keys/{key_id}", tells=OneKey, summary="Revoke an API key")
async def revoke_key(key_id: str, house: Here) -> Response:
    async with house.visit("RevokeKey") as caller:
        guard = _guard(house)
        caller.tell(about=key_id)
        record = await guard.aside(lambda: guard.keys.revoke(key_id), caller.must_be_valid)
        house.front.lasting.look()
        return _say({"key": _key(guard, record)})


# -- users -------------------------------------------------------------------------------------------------------------


@documented(router, "GET", "/users", tells=AllUsers, summary="List users")
async def list_users(house: Here) -> Response:
    async with house.visit("ListUsers"):
        guard = _guard(house)
        return _say({"users": [_user(record) for record in await guard.aside(guard.users.list)]})


@documented(router, "POST", "/users", asks=UserAsk, tells=OneUser, status=201, summary="Add a user")
async def create_user(house: Here) -> Response:
    async with house.asked("CreateUser", UserAsk) as (body, caller):
        guard = _guard(house)
        caller.tell(about=canonical_email(body.email))
        _must_include(caller, body.scopes)
        add = lambda: guard.users.add(body.email, Secret(body.password), body.scopes)  # noqa: E731
        record = await guard.aside(add, caller.must_be_valid)
        return _say({"user": _user(record)}, 201)


@documented(router, "PATCH", "/users/{email}", asks=UserChange, tells=OneUser, summary="Change a user")
async def update_user(email: str, house: Here) -> Response:
    async with house.asked("UpdateUser", UserChange) as (body, caller):
        _guard(house)
        caller.tell(about=canonical_email(email))
        if body == UserChange():
            raise BadRequest("nothing to change: give password, scopes or disabled")
        _must_include(caller, body.scopes or ())

        def allowed(record: UserRecord) -> None:
            if body.password is not None or body.disabled is False:
                # Whoever sets a password, or opens the door again, can act as that user.
                must_include(caller.principal, parse_scopes(record) if body.scopes is None else ())

        password = None if body.password is None else Secret(body.password)
        record = await _change(house, caller, email, allowed, password, body.scopes, body.disabled)
        return _say({"user": _user(record)})


@documented(router, "DELETE", "/users/{email}", tells=OneUser, summary="Disable a user")
async def disable_user(email: str, house: Here) -> Response:
    async with house.visit("DisableUser") as caller:
        caller.tell(about=canonical_email(email))
        return _say({"user": _user(await _change(house, caller, email, lambda _: None, disabled=True))})


async def _change(
    house: House, caller: Caller, email: str, allowed: Callable[[UserRecord], None],
    password: Secret | None = None, scopes: Sequence[str] | None = None, disabled: bool | None = None,
) -> UserRecord:  # fmt: skip
    guard = _guard(house)
    work = lambda: guard.users.change(email, allowed, password=password, scopes=scopes, disabled=disabled)  # noqa: E731
    record = await guard.aside(work, caller.must_be_valid)
    house.front.lasting.look()
    return record


# -- small parts -------------------------------------------------------------------------------------------------------


def _guard(house: House) -> DirectoryGuard:
    guard = house.front.guard
    if not isinstance(guard, DirectoryGuard):
        raise BadRequest("this server lets everybody in, and has neither keys nor users")
    return guard


def _must_include(caller: Caller, scopes: Sequence[str]) -> None:
    must_include(caller.principal, [parse_scope(scope) for scope in scopes])


def _say(body: dict[str, Any], status: int = 200) -> Response:
    headers = {"cache-control": "no-store"}  # one of these answers holds a secret
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _key(guard: DirectoryGuard, record: KeyRecord) -> dict[str, Any]:
    return {
        "id": record.id, "name": record.name, "scopes": record.scopes, "created_at": _moment(record.created_at),
        "last_used_at": _moment(guard.last_used(record)), "revoked_at": _moment(record.revoked_at),
    }  # fmt: skip


def _user(record: UserRecord) -> dict[str, Any]:
    return {
        "email": record.email, "scopes": record.scopes, "created_at": _moment(record.created_at),
        "disabled_at": _moment(record.disabled_at),
    }  # fmt: skip


def _moment(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)
