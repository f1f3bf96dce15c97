"""Keys, users and the audit log, for administrators of all topics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heapline.contract import admin
from heapline.contract.admin import AuditLine
from heapline.dashboard.actions import Arguments, Dialog, Done, Input, action, given
from heapline.dashboard.caller import Caller
from heapline.dashboard.page import Place, page, path_to
from heapline.dashboard.topic_rows import ROWS_MAX

SCANNED_MAX = 10  # pages of the audit log that one search reads
SCOPES_HINT = "one per line, such as orders/*:produce,consume or *:consume"


@page("/access", "access", "access.html")
async def access(caller: Caller, place: Place) -> dict[str, Any]:
    tab = place.choice("tab", "keys", "users")
    cursor = place.get("cursor") or None
    kind = admin.ListKeys if tab == "keys" else admin.ListUsers
    found: Any = await caller.do(kind(cursor, ROWS_MAX))
    return {"title": "Keys and users", "tab": tab, "items": found.items, "cursor": found.cursor}


@page("/audit", "audit", "audit.html", is_live=False)
async def audit(caller: Caller, place: Place) -> dict[str, Any]:
    wanted, request_id = place.get("q").strip().lower(), place.get("request")
    lines: list[AuditLine] = []
    cursor: str | None = place.get("cursor") or None
    is_end = False
    for _ in range(SCANNED_MAX if wanted or request_id else 1):
        # As many as are missing: a cursor continues after the last line that was read.
        found = await caller.do(admin.ReadAudit(1000 if wanted or request_id else ROWS_MAX, cursor))
        lines += [line for line in found.items if _matches(line, wanted, request_id)]
        cursor = found.cursor
        is_end = cursor is None
        if is_end or len(lines) >= ROWS_MAX:
            break
    return {"title": "Audit log", "lines": lines[:1000], "cursor": cursor, "is_end": is_end, "request_id": request_id}


def _matches(line: AuditLine, wanted: str, request_id: str) -> bool:
    if request_id:
        return line.correlation_id == request_id
    return wanted in " ".join((line.who, line.call, line.topic, line.about, line.outcome)).lower()


# -- keys --------------------------------------------------------------------------------------------------------------


def _scopes(form: Mapping[str, str]) -> list[str]:
    return [line.strip() for line in form.get("scopes", "").splitlines() if line.strip()]


async def _create_key_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    return Dialog(
        title="Create API key",
        text="The key has at most your own rights. Its secret is shown once.",
        button="Create key",
        inputs=[
            Input(name="name", label="Name", value=arguments.get("name", ""), hint="who or what will use it"),
            Input(name="scopes", label="Scopes", kind="lines", value=arguments.get("scopes", ""), hint=SCOPES_HINT),
        ],
    )


@action("create-key", _create_key_dialog)
async def create_key(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    made = await caller.do(admin.CreateKey(given(form, "name"), _scopes(form)))
    return Done(text=f"The secret of the key “{made.key.name}”; it is stored nowhere.", secret=made.secret)


async def _revoke_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    key_id = given(arguments, "key")
    keys, _ = await caller.all(admin.ListKeys)
    key = next((each for each in keys if each.id == key_id), None)
    name = key_id if key is None else key.name
    is_own = caller.principal.subject == f"key:{key_id}"
    warning = " It is the key that you are logged in with: you will be logged out." if is_own else ""
    return Dialog(
        title=f"Revoke key {name}",
        text=f"Calls and streams that use it end now. A revoked key cannot be restored.{warning}",
        button="Revoke key",
        facts={"Scopes": " ".join(key.scopes)} if key else None,
    )


@action("revoke-key", _revoke_dialog)
async def revoke_key(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    revoked = await caller.do_confirmed(admin.RevokeKey(given(arguments, "key")))
    return Done(text=f"Revoked {revoked.key.name}")


# -- users -------------------------------------------------------------------------------------------------------------


async def _create_user_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    return Dialog(
        title="Create user",
        text="A user logs in with email and password, and has at most your own rights.",
        button="Create user",
        inputs=[
            Input(name="email", label="Email", kind="email", value=arguments.get("email", ""), is_required=True),
            Input(name="password", label="Password", kind="password", is_required=True),
            Input(name="scopes", label="Scopes", kind="lines", value=arguments.get("scopes", ""), hint=SCOPES_HINT),
        ],
    )


@action("create-user", _create_user_dialog)
async def create_user(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    made = await caller.do(admin.CreateUser(given(form, "email"), given(form, "password"), _scopes(form)))
    return Done(text=f"Created {made.user.email}")


async def _change_user_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    email = given(arguments, "email")
    return Dialog(
        title=f"Change {email}",
        text="Any change ends the user's sessions. What is left empty stays.",
        button="Change",
        inputs=[
            Input(name="user", label="Email", kind="email", value=email, is_fixed=True),
            Input(name="password", label="New password", kind="password"),
            Input(name="scopes", label="Scopes", kind="lines", value=arguments.get("scopes", ""), hint=SCOPES_HINT),
        ],
    )


@action("change-user", _change_user_dialog)
async def change_user(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    email = given(arguments, "email")
    await caller.do(admin.UpdateUser(email, form.get("password") or None, _scopes(form) or None))
    return Done(text=f"Changed {email}")


async def _disable_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    email = given(arguments, "email")
    return Dialog(title=f"Disable {email}", text="The user's sessions and streams end now.", button="Disable")


@action("disable-user", _disable_dialog)
async def disable_user(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    email = given(arguments, "email")
    await caller.do_confirmed(admin.DisableUser(email))
    return Done(text=f"Disabled {email}", undo=path_to("/do/enable-user", email=email))


async def _enable_dialog(caller: Caller, arguments: Arguments) -> Dialog:
    email = given(arguments, "email")
    return Dialog(title=f"Enable {email}", text="The user may log in again.", button="Enable")


@action("enable-user", _enable_dialog)
async def enable_user(caller: Caller, arguments: Arguments, form: Mapping[str, str]) -> Done:
    email = given(arguments, "email")
    await caller.do(admin.UpdateUser(email, disabled=False))
    return Done(text=f"Enabled {email}")
