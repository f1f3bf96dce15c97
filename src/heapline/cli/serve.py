"""`heapline serve`: run a server on a directory, or on PostgreSQL databases, until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from heapline.cli.options import Value
from heapline.contract.errors import BadRequest
from heapline.logs import Log

log = Log("heapline.sql")
GC_THRESHOLD = 20_000  # objects created and not freed between two collections; Python's default is 700
SQL_NODE_FILE = "sql-node"  # in the data directory of a node, whose keys and users are elsewhere
POSTGRES_HELP = (
    "Database of the sql broker; repeat it for each shard, always in the same order. The process list shows flags, so "
    "pass URLs with a password in HEAPLINE_POSTGRES instead, separated by spaces."
)
DURABILITY_HELP = (
    "Where the sql broker stores an enqueue before it acknowledges it: wal (a log in the data directory), redis, or "
    "postgres. Default: wal."
)


def serve(
    data: Annotated[Path | None, "Directory of the queue, created if needed. Default: data."] = None,
    config: Annotated[Path | None, "YAML file with settings."] = None,
    broker_type: Annotated[str | None, "--broker", "log (a directory) or sql (PostgreSQL). Default: log."] = None,
    postgres: Annotated[list[str] | None, POSTGRES_HELP, Value("URL")] = None,
    redis: Annotated[str | None, "Redis of the sql broker, shared by its nodes. Default: none.", Value("URL")] = None,
    durability: Annotated[str | None, DURABILITY_HELP] = None,
    slow_mode: Annotated[bool | None, "With --durability redis: enqueue into PostgreSQL while Redis is down."] = None,
    host: Annotated[str | None, "Address to listen on. Default: 127.0.0.1."] = None,
    port: Annotated[int | None, "Port for Heapline's own protocol. Default: 7400."] = None,
    grpc_port: Annotated[int | None, "Port for gRPC. Default: 7410."] = None,
    http_port: Annotated[int | None, "Port for HTTP: /ui, /v1, /metrics, /healthz, /docs. Default: 7480."] = None,
    http_prefix: Annotated[str | None, "Path under which a proxy serves HTTP, such as /queue. Default: none."] = None,
    unix_socket: Annotated[Path | None, "Also listen on this Unix socket, which only this user can open."] = None,
    dashboard: Annotated[
        bool | None, "--dashboard/--no-dashboard", "Serve the dashboard under /ui/. Default: yes."
    ] = None,
    read_only: Annotated[bool | None, "The dashboard changes nothing. Other interfaces are not affected."] = None,
    log_format: Annotated[str | None, "text or json. Default: text on a terminal, otherwise json."] = None,
    tls_certificate: Annotated[Path | None, "PEM file with the certificate: use TLS on all ports."] = None,
    tls_key: Annotated[Path | None, "PEM file with the private key, mode 0600."] = None,
    tls_client_ca: Annotated[Path | None, "PEM file: accept only clients with a certificate of this CA (mTLS)."] = None,
    plaintext: Annotated[bool | None, "Serve without TLS although --host is not loopback. Keys are readable."] = None,
    insecure_everybody: Annotated[bool | None, "Disable authentication. Loopback only; for testing."] = None,
) -> None:
    """Serve a queue to other processes.

    Python programs use Heapline's own protocol, other languages gRPC or HTTP.

    Example:  [cyan]heapline serve --data ./data --port 7400[/cyan]

    On PostgreSQL:  [cyan]heapline serve --broker sql --postgres postgresql://heapline@db1/queues --data ./node[/cyan]

    SIGTERM or Ctrl-C stops it: it rejects new calls and finishes running ones. [bold]kill -9[/bold] is safe too.
    """
    given = {name: value for name, value in locals().items() if name != "config"}  # every option is a setting
    given["postgres"] = postgres or None
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's C library writes to stderr, past every log
    try:
        from heapline.dashboard.app import Dashboard
        from heapline.server.server import make_guard
        from heapline.server.server import serve as run
        from heapline.server.settings import read_settings
        from heapline.server.telemetry.logs import configure
    except ModuleNotFoundError as error:
        if str(error.name).startswith("heapline"):
            raise
        raise BadRequest(f"`heapline serve` needs {error.name!r}; run pip install 'heapline[server]'") from None
    settings = read_settings(config, **given)
    _check_port(settings.host, settings.port, "--port")
    _check_port(settings.host, settings.grpc_port, "--grpc-port")
    _check_port(settings.host, settings.http_port, "--http-port")
    configure(settings.log_format)
    pages = Dashboard if settings.dashboard else None
    if settings.broker_type == "sql" and not settings.insecure_everybody:
        run_fast(_serve_shared(settings, make_broker(settings), pages))
    else:
        run_fast(run(settings, make_guard(settings), make_broker(settings), _ready, pages))


async def _serve_shared(settings: Any, broker: Any, pages: Any) -> None:
    """Serve a broker that keeps keys and users for all nodes."""
    from heapline.server.auth.guard import shared_guard
    from heapline.server.server import serve as run

    async with broker, broker.document("auth") as document:
        guard = await asyncio.to_thread(shared_guard, document, settings.data, settings.token_ms)
        await run(settings, guard, contextlib.nullcontext(broker), _ready, pages)


def make_broker(settings: Any, clock: Any = None) -> Any:
    """Return the broker of these settings, not opened yet."""
    if settings.broker_type == "sql":
        return _make_sql_broker(settings)
    from heapline.clock import SystemClock
    from heapline.engine import EmbeddedBroker
    from heapline.engine.metrics_source import TimedDisk

    return EmbeddedBroker(
        str(settings.data), config=settings.broker_config(), disk=TimedDisk(), clock=clock or SystemClock()
    )


def _make_sql_broker(settings: Any) -> Any:
    import heapline.sql

    try:
        broker = heapline.sql.open(settings.postgres, **_sql_fields(settings))
    except ImportError as error:
        raise BadRequest(f"`--broker sql` needs {error.name!r}; run pip install 'heapline[server,sql]'") from None
    if (settings.data / "catalog.json").exists():
        raise BadRequest(f"{str(settings.data)!r} holds a queue of the log broker; choose another --data for this node")
    settings.data.mkdir(parents=True, exist_ok=True)
    (settings.data / SQL_NODE_FILE).touch()
    return broker


def _sql_fields(settings: Any) -> dict[str, Any]:
    """Return the fields of SqlConfig: a node has a write-ahead log in its directory unless the policy is another."""
    flags = {name: value for name in ("redis", "durability", "slow_mode") if (value := getattr(settings, name))}
    fields: dict[str, Any] = settings.broker | flags
    own = settings.data / "wal"
    if fields.get("durability") in (None, "wal"):
        return {"wal": str(own)} | fields
    if own.exists():
        log.warning("write-ahead log not used; start with --durability wal to flush what it has", path=str(own))
    return fields


def _check_port(host: str, port: int, flag: str) -> None:
    """Raise BadRequest if the server could not listen there, before anything is created or started."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = f"another process uses it; stop that process, or choose another port with {flag}"
        elif error.errno in (errno.EACCES, errno.EPERM):
            advice = f"ports below 1024 need special rights; choose another port with {flag}"
        else:
            advice = f"choose another --host, or another port with {flag}"
        reason = str(error.strerror).partition(" (while ")[0]  # create_server appends the address
        raise BadRequest(f"cannot listen on {host} port {port} ({reason}); {advice}") from None


def _ready(server: Any) -> None:
    _print_addresses(server)
    tune_garbage_collection()


def tune_garbage_collection() -> None:
    """Exclude what was loaded so far from garbage collection, and collect less often, in a process that runs long.

    Nearly everything is freed by reference counts; collections mostly scan modules and waiting messages again.
    """
    gc.collect()  # what is garbage now would stay forever
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 10, 10)


def _print_addresses(server: Any) -> None:
    settings = server.settings
    scheme = "http" if settings.tls_certificate is None else "https"
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.http_port}"
    ports = f"gRPC on port {server.grpc_port}, HTTP on port {server.http_port}"
    typer.echo(f"serving: Heapline on port {server.port}, {ports}")
    if server.dashboard is not None:
        typer.echo(f"  pages: {_pages_url(server, url)}")
    if settings.insecure_everybody:
        typer.echo(f"  try:   curl {url}/v1/heaps   (no authentication: every client is administrator)")
    else:
        key = settings.data / "admin.key"
        more = "POST /v1/keys" if settings.broker_type == "sql" else "heapline keys create"
        if key.exists():
            typer.echo(f"  key:   {key} (the first administrator's; create more with `{more}`)")
            typer.echo(f'  try:   curl -H "authorization: Bearer $(cat {key})" {url}/v1/heaps')
        else:
            typer.echo("  key:   admin.key in the directory of the node that started first")
    typer.echo(f"  read:  {url}/docs, {url}/metrics; stop with Ctrl-C")


def _pages_url(server: Any, url: str) -> str:
    """Return where the dashboard is; on a terminal as a link that logs the person in, once."""
    start = f"{url}{server.settings.http_prefix}/ui/"
    path = server.settings.data / "admin.key"
    if server.settings.insecure_everybody or not sys.stdout.isatty() or not path.exists():
        return start
    from heapline.server.auth.store import key_id_of

    principal = server.gate.guard.principal(f"key:{key_id_of(path.read_bytes())}")
    if principal is None:  # the first key was revoked
        return start
    token = server.sessions.mint_link(principal).token.reveal()
    return f"{start}login/{token}   (logs in once, within 10 minutes; `heapline dashboard` opens another)"


def run_fast(work: Any) -> Any:
    """Run a coroutine on uvloop if it is installed, otherwise on asyncio."""
    try:
        import uvloop as loop
    except ImportError:
        import asyncio as loop  # type: ignore[no-redef]
    return loop.run(work)
