"""The interface of a peer, and the error if it is not available."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol


class PeerMissing(Exception):
    """The peer cannot be installed or started here; the text says why, and is shown in the table."""


@dataclass(frozen=True)
class Running:
    """A peer's running server, and the interpreter that has its client."""

    pid: int  # of the server's first process
    port: int
    python: str


class Peer(Protocol):
    """Installed into `home`, which is kept; started on `directory`, which is not."""

    driver: ClassVar[str]  # benchmarks/drivers
    durability: ClassVar[str]  # what is durable when it answers, as text

    def __init__(self, home: Path) -> None: ...

    def install(self) -> None:
        """Download what is missing; raise PeerMissing if that fails."""
        ...

    @property
    def version(self) -> str:
        """Versions of server and client, once installed."""
        ...

    def start(self, directory: Path) -> AbstractContextManager[Running]: ...
