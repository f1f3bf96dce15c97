"""Administration: the description of a broker; keys, users and the audit log, which a server handles itself."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from msgspec import Meta, Struct

from heapline.contract.call import Access, Command, Page, Repeat, Right, call, call_family
from heapline.contract.errors import BadRequest
from heapline.contract.fields import PAGE_MAX, Cursor

EVERYWHERE = (Access(Right.ADMIN, ""),)
auth_call = call_family(needs=EVERYWHERE, feature="auth", route="system")
Scopes = Annotated[list[str], Meta(min_length=1, max_length=100)]
Password = Annotated[str, Meta(extra={"wanted": "secret a string"})]  # an error must not repeat it


class Description(Struct, frozen=True, omit_defaults=True):
    """The kind, version, features and settings of a broker."""

    broker: str  # "log", "sql", …
    version: str
    features: list[str]
    settings: dict[str, Any] = {}


@call(id=0x90, rpc="Describe", http="GET /v1/describe", route="system")
class Describe(Command[Description]):
    """Return the broker's features, settings and version."""


class KeyInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An API key without its secret."""

    id: str
    name: str
    scopes: list[str]
    created_at: datetime
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None


class OneKey(Struct, frozen=True):
    key: KeyInfo


class NewKey(Struct, frozen=True):
    key: KeyInfo
    secret: Annotated[str, Meta(description="the whole key; it appears in this answer and nowhere else")]


@auth_call(id=0xA0, rpc="ListKeys", http="GET /v1/keys")
class ListKeys(Command[Page[KeyInfo]]):
    """List API keys, oldest first."""

    cursor: Cursor | None = None
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 1000


@auth_call(id=0xA1, rpc="CreateKey", http="POST /v1/keys", repeat=Repeat.ONCE, audit=("name",), status=201)
class CreateKey(Command[NewKey]):
    """Create an API key with at most the caller's own rights."""

    name: str
    scopes: Scopes


@auth_call(id=0xA2, rpc="RevokeKey", http="DELETE /v1/keys/{key_id}", destroys=True, audit=("key_id",))
class RevokeKey(Command[OneKey]):
    """Revoke an API key. Calls and streams that use it end."""

    key_id: str


class UserInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    email: str
    scopes: list[str]
    created_at: datetime
    disabled_at: datetime | None = None


class OneUser(Struct, frozen=True):
    user: UserInfo


@auth_call(id=0xA3, rpc="ListUsers", http="GET /v1/users")
class ListUsers(Command[Page[UserInfo]]):
    """List users, by email."""

    cursor: Cursor | None = None
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 1000


@auth_call(id=0xA4, rpc="CreateUser", http="POST /v1/users", repeat=Repeat.ONCE, audit=("email",), status=201)
class CreateUser(Command[OneUser]):
    """Add a user with at most the caller's own rights."""

    email: str
    password: Password
    scopes: Scopes


@auth_call(id=0xA5, rpc="UpdateUser", http="PATCH /v1/users/{email}", audit=("email",))
class UpdateUser(Command[OneUser]):
    """Change a user. Any change revokes that user's tokens."""

    email: str
    password: Password | None = None
    scopes: Scopes | None = None
    disabled: bool | None = None

    def validate(self) -> None:
        if self.password is None and self.scopes is None and self.disabled is None:
            raise BadRequest("nothing to change; give password, scopes or disabled")


@auth_call(id=0xA6, rpc="DisableUser", http="DELETE /v1/users/{email}", destroys=True, audit=("email",))
class DisableUser(Command[OneUser]):
    """Disable a user. Their tokens and streams end."""

    email: str


class LoginLink(Struct, frozen=True):
    token: Annotated[
        str, Meta(description="starts one session of a browser; it appears in this answer and nowhere else")
    ]
    expires_at: datetime


@auth_call(id=0xA8, rpc="CreateLoginLink", http="POST /v1/auth/links", repeat=Repeat.ONCE, audit=(), status=201)
class CreateLoginLink(Command[LoginLink]):
    """Create a link that logs one browser in as the caller, once and soon."""


class AuditLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the audit log: who made which call, and how it ended."""

    at: datetime
    who: str
    call: str
    topic: str = ""
    about: str = ""  # the id of a key, the email of a user, the name of a group, …
    outcome: str  # "ok", or the name of the error
    count: int = 0  # messages, keys, … that the call affected
    correlation_id: str = ""


@auth_call(id=0xA7, rpc="ReadAudit", http="GET /v1/audit")
class ReadAudit(Command[Page[AuditLine]]):
    """Read the audit log, newest line first."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    cursor: Cursor | None = None
