"""What the benchmark needs of a peer, and how it says that it cannot be had."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol


class PeerMissing(Exception):
    """It cannot be installed or started here; the text says why, and stands in the table."""


@dataclass(frozen=True)
class Running:
    """A peer's server that answers, and the interpreter that has its client."""

    pid: int  # of the process all others of the server descend from
    port: int
    python: str


class Peer(Protocol):
    """Installed into `home`, which is kept; started on `directory`, which is not."""

    driver: ClassVar[str]  # benchmarks/drivers
    durability: ClassVar[str]  # what is safe when it answers, in words

    def __init__(self, home: Path) -> None: ...

    def install(self) -> None:
        """Fetch what is not there yet; PeerMissing if that fails."""
        ...

    @property
    def version(self) -> str:
        """Of server and client, once installed."""
        ...

    def start(self, directory: Path) -> AbstractContextManager[Running]: ...
