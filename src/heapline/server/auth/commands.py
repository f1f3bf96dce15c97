"""Handlers of the commands on keys and users, which a server runs itself.

The caller has `admin` on all topics, and cannot grant rights that they lack: not in a new key, not to a user, and not
by setting the password of a user who has more rights. A key's secret is in the answer that created it and nowhere else.
A change takes effect before it is answered, on open streams too. Argon2 and the disk run in a thread. Nothing is ever
deleted: a key is revoked, a user is disabled, and their names stay taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Annotated, Any

from msgspec import Meta

from heapline.contract import admin
from heapline.contract.call import Page, page_of
from heapline.contract.errors import BadRequest
from heapline.contract.message import from_ms
from heapline.server.auth.guard import StoreGuard
from heapline.server.auth.principals import Guard, Principal, check_included, parse_scope
from heapline.server.auth.secret import Secret
from heapline.server.auth.sessions import BrowserSessions
from heapline.server.auth.store import KeyRecord, UserRecord, parse_scopes
from heapline.server.auth.users import canonical_email
from heapline.server.dispatcher import Handler
from heapline.server.gate import Request

_Place = tuple[Annotated[datetime, Meta(tz=True)], str]  # of a key among all keys: when it was created, and its id


class AuthCommands:
    def __init__(self, guard: Guard, sessions: BrowserSessions) -> None:
        self._guarded, self._sessions = guard, sessions

    @property
    def _guard(self) -> StoreGuard:
        if not isinstance(self._guarded, StoreGuard):
            raise BadRequest("this server runs without authentication and has neither keys nor users")
        return self._guarded

    def handlers(self) -> dict[type[Any], Handler]:
        return {
            admin.ListKeys: self.list_keys,
            admin.CreateKey: self.create_key,
            admin.RevokeKey: self.revoke_key,
            admin.ListUsers: self.list_users,
            admin.CreateUser: self.create_user,
            admin.UpdateUser: self.update_user,
            admin.DisableUser: self.disable_user,
            admin.CreateLoginLink: self.create_login_link,
        }

    # -- keys ------------------------------------------------------------------------------------------------------

    async def list_keys(self, command: admin.ListKeys, request: Request) -> Page[admin.KeyInfo]:
        guard = self._guard
        keys = [_key(guard, record) for record in await guard.run_change(guard.keys.list)]
        by_age = attrgetter("created_at", "id")
        return page_of(keys, command.cursor, command.limit, by_age, _Place)

    async def create_key(self, command: admin.CreateKey, request: Request) -> admin.NewKey:
        guard = self._guard
        _check_included(request.caller, command.scopes)
        record, secret = await guard.run_change(
            lambda: guard.keys.create(command.name, command.scopes), request.check_credential
        )
        request.about = record.id
        return admin.NewKey(_key(guard, record), secret.reveal())

    async def revoke_key(self, command: admin.RevokeKey, request: Request) -> admin.OneKey:
        guard = self._guard
        record = await guard.run_change(lambda: guard.keys.revoke(command.key_id), request.check_credential)
        request.about = record.id
        request.gate.credentials.check()
        return admin.OneKey(_key(guard, record))

    # -- users -----------------------------------------------------------------------------------------------------

    async def list_users(self, command: admin.ListUsers, request: Request) -> Page[admin.UserInfo]:
        guard = self._guard
        users = [_user(record) for record in await guard.run_change(guard.users.list)]
        return page_of(users, command.cursor, command.limit, attrgetter("email"))

    async def create_user(self, command: admin.CreateUser, request: Request) -> admin.OneUser:
        guard = self._guard
        request.about = canonical_email(command.email)
        _check_included(request.caller, command.scopes)
        record = await guard.run_change(
            lambda: guard.users.add(command.email, Secret(command.password), command.scopes), request.check_credential
        )
        return admin.OneUser(_user(record))

    async def update_user(self, command: admin.UpdateUser, request: Request) -> admin.OneUser:
        _check_included(request.caller, command.scopes or ())

        def allowed(record: UserRecord) -> None:
            if command.password is not None or command.disabled is False:
                # A caller who sets a password, or enables a user, can then act as that user.
                check_included(request.caller, parse_scopes(record) if command.scopes is None else ())

        password = None if command.password is None else Secret(command.password)
        changes = {"password": password, "scopes": command.scopes, "disabled": command.disabled}
        return await self._change(command.email, request, allowed, changes)

    async def disable_user(self, command: admin.DisableUser, request: Request) -> admin.OneUser:
        return await self._change(command.email, request, lambda record: None, {"disabled": True})

    async def create_login_link(self, command: admin.CreateLoginLink, request: Request) -> admin.LoginLink:
        link = self._sessions.mint_link(request.caller)
        return admin.LoginLink(link.token.reveal(), from_ms(link.expires_at))

    async def _change(
        self, email: str, request: Request, allowed: Callable[[UserRecord], None], changes: dict[str, Any]
    ) -> admin.OneUser:
        guard = self._guard
        request.about = canonical_email(email)
        record = await guard.run_change(lambda: guard.users.change(email, allowed, **changes), request.check_credential)
        request.gate.credentials.check()
        return admin.OneUser(_user(record))


def _check_included(caller: Principal, scopes: Sequence[str]) -> None:
    check_included(caller, [parse_scope(scope) for scope in scopes])


def _key(guard: StoreGuard, record: KeyRecord) -> admin.KeyInfo:
    return admin.KeyInfo(
        id=record.id,
        name=record.name,
        scopes=list(record.scopes),
        created_at=from_ms(record.created_at),
        last_used_at=_instant(guard.last_used(record)),
        revoked_at=_instant(record.revoked_at),
    )


def _user(record: UserRecord) -> admin.UserInfo:
    return admin.UserInfo(
        email=record.email,
        scopes=list(record.scopes),
        created_at=from_ms(record.created_at),
        disabled_at=_instant(record.disabled_at),
    )


def _instant(ms: int | None) -> datetime | None:
    return None if ms is None else from_ms(ms)
