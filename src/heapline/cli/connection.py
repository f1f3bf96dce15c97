"""Connect a command to a server: the options that all commands share, the key, and the connection.

`over_network` turns a coroutine function that takes a broker into a command. It adds the options, connects, runs the
function, and rewrites errors: they name the command or option that helps, and the files that were searched for a key.
An error keeps its class and its data. A secret is never an option: keys are stored in files.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from heapline.cli.main import CommandGroup
from heapline.cli.options import Env, File, Panel, Seconds, Value, compose, span, with_signature
from heapline.cli.output import Output, make_console, some
from heapline.client import connect as client_connect
from heapline.client.target import ClientTls, parse_target
from heapline.contract.broker import Broker
from heapline.contract.config import FIXED_FIELDS
from heapline.contract.errors import (
    BadRequest,
    DeadlineExceeded,
    GroupExists,
    GroupNotFound,
    HeaplineError,
    ScheduleNotFound,
    TopicExists,
    TopicNotFound,
    Unauthenticated,
    UnavailableError,
    Unsupported,
)

QUIET_SECONDS = 0.5  # how long a command waits before it reports that no server listens
SERVER = Panel("Server")
TO_HELP = "Server address; heapline+tls://host:port for TLS. Several, separated by commas: the first that answers."
KEY_HELP = (
    "File that contains the API key. Default for a server on this machine: admin.key in its data directory "
    "(HEAPLINE_DATA, or ./data)."
)
CA_HELP = "Use TLS and trust the certificate authorities in this PEM file."
Address = Annotated[str, Value("HOST:PORT")]
KeyFileOption = Annotated[File | None, KEY_HELP, SERVER, Env(client_connect.KEY_FILE)]
CaOption = Annotated[File | None, CA_HELP, SERVER, Env(client_connect.CA_FILE)]
NAMES_SHOWN = 10  # existing names in an error
CONNECT_SECONDS = 2.0  # to find out whether a server listens
_WRONG_PROTOCOL = (
    "A process listens there. Check that both sides use TLS, or neither (--ca FILE, heapline+tls://HOST:PORT), and "
    "that it is the port of Heapline's own protocol, not of gRPC or HTTP"
)
TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Topic name, or namespace/name.")]


@dataclass(frozen=True, slots=True)
class Settings:
    """The servers to call, and how."""

    endpoints: Sequence[str]
    key_from: Path | None = None  # where the key was found
    local_key_file: Path | None = None  # where the key of a server on this machine would be; None for another machine
    key: str | None = None
    ca: Path | None = None
    timeout: float = 10.0  # seconds per call

    @property
    def servers(self) -> str:
        return ", ".join(self.endpoints)

    async def is_listening(self) -> bool:
        """Return whether any of the servers accepts TCP connections."""
        for endpoint in self.endpoints:
            address = parse_target(endpoint).address
            with contextlib.suppress(OSError):
                async with asyncio.timeout(CONNECT_SECONDS):
                    if isinstance(address, str):
                        _, writer = await asyncio.open_unix_connection(address)
                    else:
                        _, writer = await asyncio.open_connection(*address)
                writer.close()
                return True
        return False


def settle(
    to: Annotated[Address, TO_HELP, SERVER, Env(client_connect.URL)] = client_connect.TARGET,
    key_file: KeyFileOption = None,
    ca: CaOption = None,
    timeout: Annotated[Seconds, "Time limit per call, including retries.", SERVER] = 10.0,
) -> Settings:
    """Return the settings of the connection. All commands that call a server have these options."""
    endpoints = [part.strip() for part in to.split(",") if part.strip()]
    if not endpoints:
        raise BadRequest("--to is empty; use host:port")
    is_local = all(client_connect.is_loopback(endpoint) for endpoint in endpoints)
    key = client_connect.local_key(endpoints) if key_file is None else _read_key(key_file)
    key_from = key_file or (client_connect.local_key_file() if key is not None else None)
    return Settings(endpoints, key_from, client_connect.local_key_file() if is_local else None, key, ca, timeout)


def _read_key(file: Path) -> str:
    try:
        return client_connect.read_key(file)
    except OSError as error:
        raise BadRequest(f"cannot read the key file {str(file)!r}: {error.strerror}") from None
    except BadRequest:
        raise BadRequest(f"the key file {str(file)!r} must contain one API key and nothing else") from None


def connect(settings: Settings) -> Any:
    """Return a client, to be used with `async with`."""
    tls = ClientTls(ca=settings.ca) if settings.ca is not None else None
    return client_connect.connect(
        endpoints=list(settings.endpoints), api_key=settings.key, tls=tls, deadline=settings.timeout
    )


def over_network(
    json: str, example: str | None = None, **parts: Callable[..., Any]
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Turn `async def show(hl, out, topic: …)` into a command that connects to a server.

    `hl` is the broker and `out` prints the result. `json` describes, for --help, what --json prints. A parameter that
    is named in `parts` gets the value that its function builds from its own options. `example` has its arguments.
    """
    json_option = Annotated[bool, "--json", f"Print JSON lines for programs: {json}"]
    output = with_signature(lambda as_json: Output(as_json), {"as_json": (json_option, False)})

    def decorate(command: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        def run(server: Settings, **given: Any) -> None:
            run_on(lambda hl: command(hl, **given), server)

        shown = None if example is None else f"{command.__name__} {example}"
        return compose(command, run, {**parts, "out": output, "server": settle}, hidden=("hl",), example=shown)

    return decorate


class NetworkGroup(CommandGroup):
    """A group of commands that call a server."""

    def call(
        self, name: str, json: str, example: str | None = None, **parts: Callable[..., Any]
    ) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
        """Register a command of the group: see `over_network`."""
        return lambda command: self.command(name, example=example)(over_network(json, None, **parts)(command))


def run_on(work: Callable[[Any], Coroutine[Any, Any, None]], settings: Settings) -> None:
    """Connect, run `work` with the broker, and rewrite its errors for the command line."""
    asyncio.run(_run(work, settings))


@contextlib.asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[Any]:
    """Yield the broker, and rewrite errors for the command line."""
    async with connect(settings) as hl:
        try:
            yield hl
        except HeaplineError as error:
            raise await advised(error, hl, settings) from None


async def _run(work: Callable[[Any], Coroutine[Any, Any, None]], settings: Settings) -> None:
    watching = asyncio.ensure_future(_report_silence(settings))
    try:
        async with connected(settings) as hl:
            try:
                await work(hl)
            finally:
                watching.cancel()  # it would only repeat an error
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def _report_silence(settings: Settings) -> None:
    """Say what the command waits for: the client keeps trying, because the server may be starting."""
    await asyncio.sleep(QUIET_SECONDS)
    if not await settings.is_listening():
        text = f"no server listens at {settings.servers}; trying for {span(settings.timeout)} …"
        make_console(stderr=True).print(f"[dim]{escape(text)}[/dim]")


# -- advice ------------------------------------------------------------------------------------------------------------


async def advised(error: HeaplineError, hl: Broker, where: Settings) -> HeaplineError:
    """Return the error to show. The connection is still open, so the server can be asked which names exist."""
    text = await _advice(error, hl, where)
    if text is None:
        return error
    is_unreached = isinstance(error, UnavailableError) and not error.reached
    changed = UnavailableError() if is_unreached else copy.copy(error)
    changed.args = (text,)
    return changed


async def _advice(error: HeaplineError, hl: Any, where: Settings) -> str | None:
    match error:
        case TopicNotFound(topic=topic):
            known = await _names(hl.list_topics())
            return f"topic {topic!r} does not exist{known}. Create it with: heapline topic create {topic}"
        case ScheduleNotFound(schedule=schedule):
            known = await _names(hl.list_schedules())
            advice = known or ". Create one with: heapline schedule create NAME TOPIC --every 1h"
            return f"schedule {schedule!r} does not exist{advice}"
        case GroupNotFound(topic=topic, group=group):
            known = await _names(hl.list_groups(topic))
            create = f"heapline group create {topic} {group}"
            return f"group {group!r} of topic {topic!r} does not exist{known}. Create it with: {create}"
        case TopicExists(topic=topic, differing=differing):
            fixed = ", ".join(name for name in differing if name in FIXED_FIELDS)
            change = f"{fixed} cannot be changed;" if fixed else f"change them with: heapline topic update {topic}, or"
            return f"topic {topic!r} {_differs(differing)} {change} choose another name"
        case GroupExists(topic=topic, group=group, differing=differing):
            delete = f"delete it first with: heapline group delete {topic} {group}"
            return f"group {group!r} of topic {topic!r} {_differs(differing)} choose another name, or {delete}"
        case Unauthenticated():
            return _key_advice(where)
        case Unsupported(call=call, feature=feature):
            log_broker = "use a server with the log broker, which heapline serve starts without --broker"
            return f"the broker of {where.servers} does not support {call} (feature {feature!r}); {log_broker}"
        case UnavailableError(reached=False):
            if await where.is_listening():
                return f"cannot connect to {where.servers}; nothing was changed. {_WRONG_PROTOCOL}"
            return f"no server listens at {where.servers}; nothing was changed. {_start_advice(where)}"
        case DeadlineExceeded():
            if await where.is_listening():
                return f"{error}. {_WRONG_PROTOCOL}. If it is busy, wait longer with --timeout"
            return f"{error}; no server listens at {where.servers} now. {_start_advice(where)}"
    return None


def _differs(settings: Sequence[str]) -> str:
    return f"already exists with different settings ({', '.join(settings)});"


async def _names(listing: Awaitable[Any]) -> str:
    """Return the existing names as the continuation of a sentence, or nothing if there are none to show."""
    try:
        names = sorted(info.name for info in await listing)
    except HeaplineError:
        return ""
    return f"; there are {some(names, NAMES_SHOWN)}" if names else ""


def _key_advice(where: Settings) -> str:
    if where.key_from is not None:
        return (
            f"the server at {where.servers} rejects the key in {str(where.key_from)!r}: it belongs to another server, "
            "or is revoked. Choose a file with a valid key: --key-file FILE"
        )
    text = f"the server at {where.servers} needs an API key, and none was found: --key-file and "
    text += "HEAPLINE_API_KEY_FILE are not set"
    if where.local_key_file is not None:
        text += f", and {str(where.local_key_file)!r} cannot be read (set HEAPLINE_DATA to the server's data directory)"
    return f"{text}. Create a key with: heapline keys create"


def _start_advice(where: Settings) -> str:
    if where.local_key_file is not None:
        return "Start a server with: heapline serve --data data; or choose another one: --to HOST:PORT"
    return "Check --to (or HEAPLINE_URL) and the network"
