"""How a command reaches a server: the options that all of them share, where the key comes from, and the first word
about a server that does not answer.

`over_network` makes a command of a coroutine function that takes a broker: it adds the options, connects, runs it, and
lets advice.py put the command line's own words to what goes wrong. A secret is never an option: a key stands in a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from heapline.broker import Broker
from heapline.cli.advice import Where, advised
from heapline.cli.present import make_console
from heapline.cli.units import duration, span
from heapline.client import connecting
from heapline.client.target import ClientTls
from heapline.errors import BadRequest, HeaplineError

TIMEOUT = "10s"
QUIET_SECONDS = 0.5  # that a command may take before somebody wonders whether the server is there
PANEL = "Server"

ToOption = Annotated[
    str, typer.Option(
        "--to", metavar="HOST:PORT", envvar=connecting.URL, rich_help_panel=PANEL,
        help="The server; heaplines://host:port over TLS. Several with commas: the first that answers.",
    ),
]  # fmt: skip
KeyFileOption = Annotated[
    Path | None, typer.Option(
        "--key-file", metavar="FILE", envvar=connecting.KEY_FILE, rich_help_panel=PANEL,
        help="A file with the API key. Without one, and for a server on this machine, the admin.key of its data "
        "directory is used (HEAPLINE_DATA, or ./data).",
    ),
]  # fmt: skip
CaOption = Annotated[
    Path | None, typer.Option(
        "--ca", metavar="FILE", envvar=connecting.CA_FILE, rich_help_panel=PANEL,
        help="Speak TLS, and trust the authorities in this PEM file.",
    ),
]  # fmt: skip
TimeoutOption = Annotated[
    float, typer.Option(
        "--timeout", metavar="DURATION", parser=duration, rich_help_panel=PANEL,
        help="How long a call may take, with everything that is tried again.",
    ),
]  # fmt: skip
#: Name, annotation and default of every option that is added.
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "to": (ToOption, connecting.TARGET), "key_file": (KeyFileOption, None), "ca": (CaOption, None),
    "timeout": (TimeoutOption, TIMEOUT),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """What the options came to."""

    endpoints: list[str]
    key: str | None
    tls: ClientTls | None
    timeout: float
    where: Where


def settle(to: str, key_file: Path | None, ca: Path | None, timeout: float) -> Settings:
    endpoints = [part.strip() for part in to.split(",") if part.strip()]
    if not endpoints:
        raise BadRequest("--to names no server: write host:port")
    local = all(connecting.is_loopback(endpoint) for endpoint in endpoints)
    key = connecting.local_key(endpoints) if key_file is None else _key_of(key_file)
    found_in = key_file or (connecting.local_key_file() if key is not None else None)
    where = Where(endpoints, found_in, connecting.local_key_file() if local else None)
    return Settings(endpoints, key, ClientTls(ca=ca) if ca is not None else None, timeout, where)


def connect(settings: Settings) -> Any:
    """A client to enter."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C library writes to stderr past every log
    try:
        return connecting.connect(
            endpoints=settings.endpoints, api_key=settings.key, tls=settings.tls, deadline=settings.timeout
        )
    except ImportError:
        raise BadRequest("speaking to a server needs more packages: pip install 'heapline[client]'") from None


def over_network(command: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """`async def show(hl, topic: …)` becomes a command with the options of a connection; `hl` is the broker."""
    signature = inspect.signature(command, eval_str=True)
    own = list(signature.parameters.values())[1:]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _OPTIONS.items()
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        settings = settle(**{name: given.pop(name) for name in _OPTIONS})
        run_on(functools.partial(command, **given), settings)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + added
    run.__signature__ = signature.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def run_on(work: Callable[[Broker], Coroutine[Any, Any, None]], settings: Settings) -> None:
    """Do something with a server; what goes wrong is told in the words of the command line."""
    asyncio.run(_run(work, settings))


async def _run(work: Callable[[Broker], Coroutine[Any, Any, None]], settings: Settings) -> None:
    watching = asyncio.ensure_future(_tell_if_nobody_listens(settings))
    try:
        async with connect(settings) as hl:
            try:
                await work(hl)
            except HeaplineError as error:
                watching.cancel()  # its words would only repeat the error's
                raise await advised(error, hl, settings.where) from None
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def _tell_if_nobody_listens(settings: Settings) -> None:
    """The client goes on trying, because the server may be starting; whoever waits should know what for."""
    await asyncio.sleep(QUIET_SECONDS)
    if not await settings.where.is_listening():
        trying = f"nobody listens at {settings.where.servers}; trying for {span(settings.timeout)} …"
        make_console(stderr=True).print(f"[dim]{escape(trying)}[/dim]")


def _key_of(file: Path) -> str:
    try:
        return connecting.read_key(file)
    except OSError as error:
        raise BadRequest(f"the key file {str(file)!r} cannot be read: {error.strerror}") from None
    except BadRequest:
        raise BadRequest(f"the key file {str(file)!r} must hold one API key and nothing else") from None
