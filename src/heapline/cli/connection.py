"""How a command reaches a server: the options that all commands share, the key, and the connection.

`over_network` turns a coroutine function that takes a broker into a command. It adds the options, connects, runs the
function, and lets error_help.py rewrite errors. A secret is never an option: keys are stored in files.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from heapline.cli.error_help import Where, advised
from heapline.cli.output import Output, make_console
from heapline.cli.units import duration_option, option, span
from heapline.client import connect as client_connect
from heapline.client.target import ClientTls
from heapline.contract.errors import BadRequest, HeaplineError

TIMEOUT = "10s"
QUIET_SECONDS = 0.5  # how long a command waits before it reports that no server listens
PANEL = "Server"
TO_HELP = "Server address; heaplines://host:port for TLS. Several, separated by commas: the first that answers."
KEY_HELP = (
    "File that contains the API key. Default for a server on this machine: admin.key in its data directory "
    "(HEAPLINE_DATA, or ./data)."
)
CA_HELP = "Use TLS and trust the certificate authorities in this PEM file."


ToOption = Annotated[str, option("--to", TO_HELP, panel=PANEL, metavar="HOST:PORT", envvar=client_connect.URL)]
#: For commands that can use a data directory instead: only an explicit --to conflicts with it.
OptionalToOption = Annotated[
    str | None,
    option("--to", f"{TO_HELP} Default: HEAPLINE_URL, or localhost:7400.", panel=PANEL, metavar="HOST:PORT"),
]
KeyFileOption = Annotated[
    Path | None, option("--key-file", KEY_HELP, panel=PANEL, metavar="FILE", envvar=client_connect.KEY_FILE)
]
CaOption = Annotated[Path | None, option("--ca", CA_HELP, panel=PANEL, metavar="FILE", envvar=client_connect.CA_FILE)]
TimeoutOption = Annotated[float, duration_option("--timeout", "Time limit per call, including retries.", panel=PANEL)]
#: Name -> annotation and default of the options that every command that calls a server has.
OPTIONS: dict[str, tuple[Any, Any]] = {
    "to": (ToOption, client_connect.TARGET), "key_file": (KeyFileOption, None), "ca": (CaOption, None),
    "timeout": (TimeoutOption, TIMEOUT),
}  # fmt: skip
TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Topic name, or namespace/name.")]


@dataclass(frozen=True, slots=True)
class Settings:
    """The connection that the options describe."""

    endpoints: list[str]
    key: str | None
    tls: ClientTls | None
    timeout: float  # seconds per call
    where: Where


def settle(to: str, key_file: Path | None, ca: Path | None, timeout: float) -> Settings:
    """Read the key file and return the settings of the connection."""
    endpoints = [part.strip() for part in to.split(",") if part.strip()]
    if not endpoints:
        raise BadRequest("--to is empty; use host:port")
    is_local = all(client_connect.is_loopback(endpoint) for endpoint in endpoints)
    key = client_connect.local_key(endpoints) if key_file is None else _read_key(key_file)
    key_from = key_file or (client_connect.local_key_file() if key is not None else None)
    where = Where(endpoints, key_from, client_connect.local_key_file() if is_local else None)
    return Settings(endpoints, key, ClientTls(ca=ca) if ca is not None else None, timeout, where)


def _read_key(file: Path) -> str:
    try:
        return client_connect.read_key(file)
    except OSError as error:
        raise BadRequest(f"cannot read the key file {str(file)!r}: {error.strerror}") from None
    except BadRequest:
        raise BadRequest(f"the key file {str(file)!r} must contain one API key and nothing else") from None


def connect(settings: Settings) -> Any:
    """Return a client, to be used with `async with`."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's C library writes to stderr, past every log
    try:
        return client_connect.connect(
            endpoints=settings.endpoints, api_key=settings.key, tls=settings.tls, deadline=settings.timeout
        )
    except ImportError:
        raise BadRequest("commands that call a server need more packages; pip install 'heapline[client]'") from None


class OptionSet(NamedTuple):
    """Options that several commands share, and the one value that is built from them."""

    options: dict[str, tuple[Any, Any]]  # name -> annotation and default
    build: Callable[..., Any]


def over_network(
    json: str, **sets: OptionSet
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Turn `async def show(hl, out, topic: …)` into a command that connects to a server.

    `hl` is the broker and `out` prints the result. `json` describes, for --help, what --json prints. A parameter that
    is named in `sets` gets the value that its option set builds.
    """

    def decorate(command: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        json_option = Annotated[bool, option("--json", f"Print JSON lines for programs: {json}")]
        shared = {name: entry for option_set in sets.values() for name, entry in option_set.options.items()}

        def run(**given: Any) -> None:
            out = Output(given.pop("as_json"))
            settings = settle(**{name: given.pop(name) for name in OPTIONS})
            for parameter, (options, build) in sets.items():
                given[parameter] = build(**{name: given.pop(name) for name in options})
            run_on(lambda hl: command(hl, out, **given), settings)

        return with_options(run, command, ("hl", "out", *sets), {**shared, "as_json": (json_option, False), **OPTIONS})

    return decorate


def with_options(
    run: Callable[..., None], command: Callable[..., Any], hidden: Sequence[str], added: dict[str, tuple[Any, Any]]
) -> Callable[..., None]:
    """Give `run` the name, the help and the options of `command` except the hidden ones, and the added options."""
    functools.update_wrapper(run, command)
    del run.__wrapped__  # type: ignore[attr-defined]
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in hidden:
            annotation = eval(parameter.annotation, command.__globals__)
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotation))
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in added.items()
    ]
    run.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def run_on(work: Callable[[Any], Coroutine[Any, Any, None]], settings: Settings) -> None:
    """Connect, run `work` with the broker, and rewrite its errors for the command line."""
    asyncio.run(_run(work, settings))


async def _run(work: Callable[[Any], Coroutine[Any, Any, None]], settings: Settings) -> None:
    watching = asyncio.ensure_future(_report_silence(settings))
    try:
        async with connect(settings) as hl:
            try:
                await work(hl)
            except HeaplineError as error:
                watching.cancel()  # it would only repeat the error
                raise await advised(error, hl, settings.where) from None
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def _report_silence(settings: Settings) -> None:
    """Say what the command waits for: the client keeps trying, because the server may be starting."""
    await asyncio.sleep(QUIET_SECONDS)
    if not await settings.where.is_listening():
        text = f"no server listens at {settings.where.servers}; trying for {span(settings.timeout)} …"
        make_console(stderr=True).print(f"[dim]{escape(text)}[/dim]")
