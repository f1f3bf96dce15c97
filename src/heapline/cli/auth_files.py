"""How `heapline keys` and `heapline users` reach a data directory, and leave a line in its audit log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from heapline.clock import SystemClock
from heapline.errors import BadRequest, HeaplineError
from heapline.server.auth.audit import AuditLog
from heapline.server.auth.hashing import Argon2id
from heapline.server.auth.keys import Keys
from heapline.server.auth.private import PrivateDisk
from heapline.server.auth.store import AuthStore
from heapline.server.auth.users import Users

DataOption = Annotated[Path, typer.Option("--data", "-d", envvar="HEAPLINE_DATA", help="The server's data directory.")]
DATA = Path("data")


class AuthFiles:
    def __init__(self, directory: Path) -> None:
        clock, hasher = SystemClock(), Argon2id()
        store = AuthStore(PrivateDisk(), str(directory), clock)
        self.keys, self.users = Keys(store, hasher), Users(store, hasher)
        self._audit = AuditLog(str(directory), clock)

    @contextmanager
    def audited(self, call: str) -> Iterator[Callable[[str], None]]:
        """Gives a function to name the key or user with, once it is known."""
        named = [""]
        outcome = "ok"
        try:
            yield lambda name: named.__setitem__(0, name)
        except HeaplineError as error:
            outcome = type(error).__name__
            raise
        finally:
            self._audit.write("local", call, about=named[0], outcome=outcome)


def open_auth(directory: Path) -> AuthFiles:
    if not directory.is_dir():
        raise BadRequest(f"there is no directory {str(directory)!r}: name the server's data directory with --data")
    return AuthFiles(directory)
