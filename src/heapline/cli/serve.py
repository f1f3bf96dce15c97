"""`heapline serve`: run a server on a directory until it is told to stop."""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer


def serve(
    data: Annotated[Path | None, typer.Option(help="Where the queue lives; made if it is not there.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; loopback unless you say otherwise.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port of the gRPC face; 7400.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of HTTP: /v1, /metrics, /healthz, /docs; 7480.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json; text on a terminal, else json.")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM file: serve over TLS on both ports.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its private key, mode 0600.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM file: only clients with a certificate of this authority (mTLS).")
    ] = None,
    plaintext: Annotated[
        bool | None, typer.Option("--plaintext", help="No TLS though others can reach the host; keys can be read.")
    ] = None,
    insecure_everybody: Annotated[
        bool | None, typer.Option("--insecure-everybody", help="No guard, on loopback only: for trials.")
    ] = None,
) -> None:
    """Serve a queue to other processes, over gRPC and HTTP.

    Example:  [cyan]heapline serve --data ./data --grpc-port 7400[/cyan]

    Stops on SIGTERM or Ctrl-C: new calls are refused, those under way finish. [bold]kill -9[/bold] is safe too.
    """
    if find_spec("grpc") is None:
        raise typer.BadParameter("the server needs more packages: pip install 'heapline[server]'")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C library writes to stderr past every log
    from heapline.server.app import make_guard
    from heapline.server.app import serve as run
    from heapline.server.observing.json_logs import configure
    from heapline.server.settings import read_settings

    settings = read_settings(
        config,
        data=data,
        host=host,
        grpc_port=grpc_port,
        http_port=http_port,
        insecure_everybody=insecure_everybody,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        plaintext=plaintext,
        log_format=log_format,
    )
    configure(settings.log_format)
    guard = make_guard(settings)
    _run(run(settings, guard, _say))


def _say(server: Any) -> None:
    """Where it serves, and what to try first."""
    settings = server.settings
    scheme = "http" if settings.tls_certificate is None else "https"
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.http_port}"
    typer.echo(f"serving: gRPC on port {server.grpc_port}, HTTP on port {server.http_port}")
    if settings.insecure_everybody:
        typer.echo(f"  try:   curl {url}/v1/heaps   (no key: whoever reaches the ports is administrator)")
    else:
        key = settings.data / "admin.key"
        typer.echo(f"  key:   {key} (the first administrator's; more with `heapline keys create`)")
        typer.echo(f'  try:   curl -H "authorization: Bearer $(cat {key})" {url}/v1/heaps')
    typer.echo(f"  read:  {url}/docs, {url}/metrics; stop with Ctrl-C")


def _run(work: Any) -> None:
    if find_spec("uvloop") is not None:
        import uvloop

        uvloop.run(work)
    else:
        asyncio.run(work)
