"""Addresses of servers.

`host:port` and `heapline://host:port` are the native wire, `heapline+tls://host:port` the same with TLS,
`unix:///path` a socket of this machine, `http://…` and `https://…` the HTTP interface. A plain `host:port` uses TLS if
`tls` is given. The port defaults to 7400, over HTTP to 7480.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from heapline.contract.errors import BadRequest

PORT, HTTP_PORT = 7400, 7480
PLAIN, SECURE, UNIX, HTTP, HTTPS = "heapline", "heapline+tls", "unix", "http", "https"
WRITE = f"write host:port, {SECURE}://host:port (TLS), unix:///path, or http://host:port"


@dataclass(frozen=True, kw_only=True)
class ClientTls:
    """The certificate authorities that a client trusts, and its own certificate for mTLS. All files are PEM."""

    ca: Path | str | None = None  # authorities to trust; None: those of the system
    certificate: Path | str | None = None
    key: Path | str | None = None  # the certificate's private key

    def context(self) -> ssl.SSLContext:
        if (self.certificate is None) != (self.key is None):
            raise BadRequest("a client certificate needs its key, and a key its certificate; give both or neither")
        try:
            context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
            if self.certificate is not None:
                context.load_cert_chain(str(self.certificate), None if self.key is None else str(self.key))
        except OSError as error:  # an SSLError is one too
            raise BadRequest(f"cannot read a TLS file: {error}") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context


@dataclass(frozen=True)
class Target:
    address: tuple[str, int] | str  # host and port, or the path of a Unix socket
    tls: ClientTls | None = None
    is_http: bool = False

    def __str__(self) -> str:
        if isinstance(self.address, str):
            return f"{UNIX}://{self.address}"
        host, port = self.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def host(self) -> str:
        """The name or address of the server's machine."""
        return "localhost" if isinstance(self.address, str) else self.address[0]


def parse_target(target: str, tls: ClientTls | None = None) -> Target:
    """
    >>> parse_target("heapline+tls://queue.internal")
    Target(address=('queue.internal', 7400), tls=ClientTls(ca=None, certificate=None, key=None), is_http=False)
    >>> parse_target("localhost:7400").address, parse_target("unix:///run/heapline.sock").address
    (('localhost', 7400), '/run/heapline.sock')
    """
    scheme, there, rest = target.rpartition("://")
    if there and scheme not in (PLAIN, SECURE, UNIX, HTTP, HTTPS):
        raise BadRequest(f"{target!r} is not a server; {WRITE}")
    if scheme in (PLAIN, HTTP, UNIX) and tls is not None:
        raise BadRequest(f"{target!r} does not use TLS, but TLS files are given; write {SECURE}:// or https://")
    if scheme == UNIX:
        if not rest.startswith("/"):
            raise BadRequest(f"{target!r} does not name a socket; write unix:///path")
        return Target(rest)
    if scheme in (SECURE, HTTPS) and tls is None:
        tls = ClientTls()
    is_http = scheme in (HTTP, HTTPS)
    host, port = _split(rest.rstrip("/"), target)
    if port is None:
        port = HTTP_PORT if is_http else PORT
    return Target((host, port), tls, is_http)


def _split(address: str, target: str) -> tuple[str, int | None]:
    """Return host and port. An IPv6 address with a port is in brackets."""
    if address.startswith("["):
        host, _, port = address[1:].partition("]")
        port = port.removeprefix(":")
    elif address.count(":") > 1:
        host, port = address, ""
    else:
        host, _, port = address.partition(":")
    if not host or "/" in address or (port and not (port.isdecimal() and int(port) < 1 << 16)):
        raise BadRequest(f"{target!r} does not name a server; {WRITE}")
    return host, int(port) if port else None
