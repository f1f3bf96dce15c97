"""`heapline serve`: run a server on a directory until it is stopped."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from heapline.contract.errors import BadRequest


def serve(
    data: Annotated[Path | None, "Directory of the queue, created if needed. Default: data."] = None,
    config: Annotated[Path | None, "YAML file with settings."] = None,
    host: Annotated[str | None, "Address to listen on. Default: 127.0.0.1."] = None,
    grpc_port: Annotated[int | None, "Port for gRPC. Default: 7400."] = None,
    http_port: Annotated[int | None, "Port for HTTP: /v1, /metrics, /healthz, /docs. Default: 7480."] = None,
    log_format: Annotated[str | None, "text or json. Default: text on a terminal, otherwise json."] = None,
    tls_certificate: Annotated[Path | None, "PEM file with the certificate: use TLS on both ports."] = None,
    tls_key: Annotated[Path | None, "PEM file with the private key, mode 0600."] = None,
    tls_client_ca: Annotated[Path | None, "PEM file: accept only clients with a certificate of this CA (mTLS)."] = None,
    plaintext: Annotated[bool | None, "Serve without TLS although --host is not loopback. Keys are readable."] = None,
    insecure_everybody: Annotated[bool | None, "Disable authentication. Loopback only; for testing."] = None,
) -> None:
    """Serve a queue to other processes over gRPC and HTTP.

    Example:  [cyan]heapline serve --data ./data --grpc-port 7400[/cyan]

    SIGTERM or Ctrl-C stops it: it rejects new calls and finishes running ones. [bold]kill -9[/bold] is safe too.
    """
    given = {name: value for name, value in locals().items() if name != "config"}  # every option is a setting
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's C library writes to stderr, past every log
    try:
        from heapline.server.server import make_guard
        from heapline.server.server import serve as run
        from heapline.server.settings import read_settings
        from heapline.server.telemetry.logs import configure
    except ModuleNotFoundError as error:
        if str(error.name).startswith("heapline"):
            raise
        raise BadRequest(f"`heapline serve` needs {error.name!r}; run pip install 'heapline[server]'") from None
    settings = read_settings(config, **given)
    _check_port(settings.host, settings.grpc_port, "--grpc-port")
    _check_port(settings.host, settings.http_port, "--http-port")
    configure(settings.log_format)
    run_fast(run(settings, make_guard(settings), make_broker(settings), _print_addresses))


def make_broker(settings: Any, clock: Any = None) -> Any:
    """Return the broker of these settings, not opened yet."""
    from heapline.clock import SystemClock
    from heapline.engine import EmbeddedBroker
    from heapline.engine.metrics_source import TimedDisk

    return EmbeddedBroker(
        str(settings.data), config=settings.broker_config(), disk=TimedDisk(), clock=clock or SystemClock()
    )


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
        raise BadRequest(f"cannot listen on {host} port {port} ({error.strerror}); {advice}") from None


def _print_addresses(server: Any) -> None:
    settings = server.settings
    scheme = "http" if settings.tls_certificate is None else "https"
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.http_port}"
    typer.echo(f"serving: gRPC on port {server.grpc_port}, HTTP on port {server.http_port}")
    if settings.insecure_everybody:
        typer.echo(f"  try:   curl {url}/v1/heaps   (no authentication: every client is administrator)")
    else:
        key = settings.data / "admin.key"
        typer.echo(f"  key:   {key} (the first administrator's; create more with `heapline keys create`)")
        typer.echo(f'  try:   curl -H "authorization: Bearer $(cat {key})" {url}/v1/heaps')
    typer.echo(f"  read:  {url}/docs, {url}/metrics; stop with Ctrl-C")


def run_fast(work: Any) -> Any:
    """Run a coroutine on uvloop if it is installed, otherwise on asyncio."""
    try:
        import uvloop as loop
    except ImportError:
        import asyncio as loop  # type: ignore[no-redef]
    return loop.run(work)
