"""Addresses of servers: `heaplines://host:port` with TLS, `heapline://host:port` without.

A plain `host:port` uses TLS if `tls` is given. The port defaults to 7400.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heapline.contract.errors import BadRequest

PORT = 7400
SECURE, PLAIN = "heaplines", "heapline"


@dataclass(frozen=True, kw_only=True)
class ClientTls:
    """The certificate authorities that a client trusts, and its own certificate for mTLS. All files are PEM."""

    ca: Path | str | None = None  # authorities to trust; None: gRPC's own list
    certificate: Path | str | None = None
    key: Path | str | None = None  # the certificate's private key

    def credentials(self) -> Any:
        import grpc  # `import heapline` does not need it

        if (self.certificate is None) != (self.key is None):
            raise BadRequest("a client certificate needs its key, and a key its certificate; give both or neither")
        try:
            ca, key, certificate = (
                None if path is None else Path(path).read_bytes() for path in (self.ca, self.key, self.certificate)
            )
        except OSError as error:
            raise BadRequest(f"cannot read a TLS file: {error}") from None
        return grpc.ssl_channel_credentials(ca, key, certificate)


def parse_target(target: str, tls: ClientTls | None = None) -> tuple[str, ClientTls | None]:
    """
    >>> parse_target("heaplines://queue.internal")
    ('queue.internal:7400', ClientTls(ca=None, certificate=None, key=None))
    >>> parse_target("localhost:7400")
    ('localhost:7400', None)
    """
    scheme, there, address = target.rpartition("://")
    if there and scheme not in (SECURE, PLAIN):
        raise BadRequest(f"{target!r} is not a server; write {SECURE}://host:port (TLS) or {PLAIN}://host:port")
    if scheme == PLAIN and tls is not None:
        raise BadRequest(f"{target!r} does not use TLS, but TLS files are given; write {SECURE}://{address}")
    if scheme == SECURE and tls is None:
        tls = ClientTls()
    address = address.rstrip("/")
    if not address or "/" in address:
        raise BadRequest(f"{target!r} does not name a server; write {SECURE}://host:port")
    has_port = ":" in address.rpartition("]")[2] if address.startswith("[") else ":" in address
    return (address if has_port else f"{address}:{PORT}"), tls
