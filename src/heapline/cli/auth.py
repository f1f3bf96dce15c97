"""`heapline keys`, `heapline users` and `heapline certs`: credentials of a data directory.

Keys and users are changed in the directory itself, even while a server runs on it. The server notices a change within
a second, and every change is written to the audit log. The secret of a key is printed once, alone on stdout, and is
stored nowhere. A password is typed at the terminal or read from a file, because the shell's history and the process
list show arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from heapline.cli.main import CommandGroup
from heapline.cli.options import Env, JsonOption, YesOption
from heapline.cli.output import Output, bold, confirm, make_console, not_a_directory, timestamp
from heapline.cli.serve import SQL_NODE_FILE
from heapline.clock import SystemClock
from heapline.contract.errors import BadRequest, HeaplineError
from heapline.server.audit import AuditLog
from heapline.server.auth.dev_certs import make_dev_certs
from heapline.server.auth.keys import Keys
from heapline.server.auth.passwords import Argon2id
from heapline.server.auth.secret import PrivateDisk, Secret, redact, refuse_readable_by_others
from heapline.server.auth.store import DirectoryStore, UserRecord
from heapline.server.auth.users import Users

DATA = Path("data")
SCOPE_HELP = "PATTERN:ACTIONS; repeatable. * matches any part of a name; actions are produce, consume, admin."
DataOption = Annotated[Path, "--data -d", "Data directory of the server.", Env("HEAPLINE_DATA")]
ScopeOption = Annotated[list[str], "--scope -s", SCOPE_HELP]
EmailArgument = Annotated[str, typer.Argument(help="Email address of the user (case-insensitive).")]
PasswordFileOption = Annotated[
    Path | None, "--password-file", "Read the password from this file (mode 0600), or from stdin with -."
]

keys_app = CommandGroup(
    "keys",
    example='keys create --name billing --scope "orders/*:produce"',
    more="A key's scopes say which topics it may produce to, consume from or administer. A server that runs on the "
    "same directory notices every change within a second.",
)
users_app = CommandGroup(
    "users",
    example='users add ada@example.org --scope "*:admin"',
    more="A login returns a short-lived token. Any change to a user revokes that user's tokens.",
)
certs_app = CommandGroup("certs", example="certs dev certs")


class AuthFiles:
    """The keys, users and audit log of a data directory."""

    def __init__(self, directory: Path) -> None:
        clock, hasher = SystemClock(), Argon2id()
        store = DirectoryStore(PrivateDisk(), str(directory), clock)
        self.keys, self.users = Keys(store, hasher), Users(store, hasher)
        self._audit = AuditLog(str(directory), clock)

    @contextmanager
    def audited(self, call: str, about: str = "") -> Iterator[Callable[[str], None]]:
        """Write the outcome to the audit log. Yield a function that sets the key or user the call is about."""
        names = [about]
        outcome = "ok"
        try:
            yield names.append
        except HeaplineError as error:
            outcome = type(error).__name__
            raise
        finally:
            self._audit.write("local", call, about=names[-1], outcome=outcome)


def open_auth(directory: Path) -> AuthFiles:
    if not directory.is_dir():
        raise BadRequest(f"{not_a_directory(directory)}; set --data to the server's data directory")
    if (directory / SQL_NODE_FILE).exists():
        raise BadRequest(
            f"{str(directory)!r} belongs to a node of the sql broker, whose keys and users are in PostgreSQL; change "
            "them through a node, with its calls under /v1/keys and /v1/users"
        )
    return AuthFiles(directory)


def _fields(*names: str) -> Callable[[object], dict[str, object]]:
    """Return a function that picks the fields of a record that --json prints; hashes are not among them."""
    return lambda record: {name: getattr(record, name) for name in names}


# -- keys --------------------------------------------------------------------------------------------------------------


@keys_app.command("create", example='--name worker --scope "orders/*:consume" --scope "jobs:produce,consume"')
def create_key_command(
    name: Annotated[str, "-n", "Purpose of the key, shown in lists."],
    scope: ScopeOption,
    data: DataOption = DATA,
) -> None:
    """Create a key and print its secret once. It cannot be printed again, because only its hash is stored.

    Write it to a file:  [cyan](umask 077; heapline keys create -n worker -s "jobs:consume" > worker.key)[/cyan]
    """
    auth = open_auth(data)
    with auth.audited("keys.create") as about:
        record, secret = auth.keys.create(name, scope)
        about(record.id)
    make_console(stderr=True).print(f"created key {bold(record.id)}; its secret is shown only this time:")
    typer.echo(secret.reveal())


@keys_app.command("list", example="--data data")
def list_keys_command(data: DataOption = DATA, as_json: JsonOption = False) -> None:
    """List all keys, their scopes, and when each was last used (to the minute)."""
    Output(as_json).table(
        open_auth(data).keys.list(),
        ("id", "name", "scopes", "created", "last used", "state"),
        lambda key: (
            key.id,
            escape(key.name),
            "\n".join(key.scopes),
            timestamp(key.created_at),
            "never" if key.last_used_at is None else timestamp(key.last_used_at),
            _state(key.revoked_at, "revoked"),
        ),
        title="API keys",
        empty="no keys exist",
        json=_fields("id", "name", "scopes", "created_at", "last_used_at", "revoked_at"),
    )


@keys_app.command("revoke", example="9f86d081884c7d65")
def revoke_key_command(
    key_id: Annotated[str, typer.Argument(help="Id of the key, as `list` shows it.")],
    data: DataOption = DATA,
    yes: YesOption = False,
) -> None:
    """Revoke a key permanently, and end its open streams. Revoking it again changes nothing. Asks first."""
    auth = open_auth(data)
    confirm(f"Revoke key {redact(key_id)}? It cannot be restored.", yes)
    with auth.audited("keys.revoke") as about:
        record = auth.keys.revoke(key_id)
        about(record.id)
    make_console().print(f"revoked key {bold(record.id)} ({escape(record.name)})")


# -- users -------------------------------------------------------------------------------------------------------------


@users_app.command("add", example='ada@example.org --scope "orders/*:produce,consume"')
def add_user_command(
    email: EmailArgument, scope: ScopeOption, data: DataOption = DATA, password_file: PasswordFileOption = None
) -> None:
    """Add a user. Asks for the password."""
    password = _password(password_file, open_auth(data))
    _change("users.add", data, email, lambda users: users.add(email, password, scope), "added user {}")


@users_app.command("list", example="--data data")
def list_users_command(data: DataOption = DATA, as_json: JsonOption = False) -> None:
    """List all users with their scopes."""
    Output(as_json).table(
        open_auth(data).users.list(),
        ("email", "scopes", "created", "state"),
        lambda user: (
            escape(user.email),
            "\n".join(user.scopes),
            timestamp(user.created_at),
            _state(user.disabled_at, "disabled"),
        ),
        title="Users",
        empty="no users exist",
        json=_fields("email", "scopes", "created_at", "disabled_at"),
    )


@users_app.command("disable", example="ada@example.org")
def disable_user_command(email: EmailArgument, data: DataOption = DATA, yes: YesOption = False) -> None:
    """Disable a user, and revoke the user's tokens immediately. Asks first."""
    open_auth(data)  # a wrong directory is reported before the question
    confirm(f"Disable user {email}?", yes)
    _change("users.disable", data, email, lambda users: users.change(email, disabled=True), "disabled user {}")


@users_app.command("enable", example="ada@example.org")
def enable_user_command(email: EmailArgument, data: DataOption = DATA) -> None:
    """Enable a disabled user."""
    _change("users.enable", data, email, lambda users: users.change(email, disabled=False), "enabled user {}")


@users_app.command("password", example="ada@example.org")
def password_command(email: EmailArgument, data: DataOption = DATA, password_file: PasswordFileOption = None) -> None:
    """Change the password of a user. Asks for it."""
    password = _password(password_file, open_auth(data))
    _change(
        "users.password", data, email, lambda users: users.change(email, password=password), "changed password of {}"
    )


@users_app.command("scopes", example='ada@example.org --scope "orders/*:consume"')
def scopes_command(email: EmailArgument, scope: ScopeOption, data: DataOption = DATA) -> None:
    """Replace the scopes of a user."""
    _change("users.scopes", data, email, lambda users: users.change(email, scopes=scope), "changed scopes of {}")


def _change(call: str, data: Path, email: str, change: Callable[[Users], UserRecord], outcome: str) -> None:
    auth = open_auth(data)
    with auth.audited(call, email):
        record = change(auth.users)
    make_console().print(outcome.format(bold(record.email)))


def _password(source: Path | None, auth: AuthFiles) -> Secret:
    """Return the password. `auth` proves that the data directory exists before a password is typed."""
    if source is None:
        return Secret(typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True))
    if str(source) == "-":
        return Secret(sys.stdin.readline().rstrip("\r\n"))
    refuse_readable_by_others(str(source))
    try:
        return Secret(source.read_text(encoding="utf-8").rstrip("\r\n"))
    except UnicodeDecodeError:
        raise BadRequest(f"{str(source)!r} is not text") from None


def _state(ended_at: int | None, state: str) -> str:
    return "[green]valid[/green]" if ended_at is None else f"[red]{state} {timestamp(ended_at)}[/red]"


# -- certificates ------------------------------------------------------------------------------------------------------


@certs_app.command("dev", example="certs --host queue.internal")
def dev_command(
    directory: Annotated[Path, typer.Argument(help="Target directory; created if it does not exist.")],
    host: Annotated[list[str] | None, "Additional name or address of the server; repeatable."] = None,
) -> None:
    """Create a development CA, and a server and a client certificate signed by it (mode 0600, valid for a year).

    Valid for localhost, 127.0.0.1 and ::1. The CA's own key is not stored, so it cannot sign more certificates.
    """
    console = make_console()
    for path in make_dev_certs(directory, SystemClock().wall_ms(), host or ()):
        console.print(escape(str(path)))
