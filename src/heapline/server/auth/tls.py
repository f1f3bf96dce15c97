"""TLS and mTLS from files to what the faces take: bytes for gRPC, an SSLContext for HTTP.

With `client_ca` only clients with a certificate of that authority get as far as sending a key (mTLS); who they are is
still told by the key. TLS 1.2 is the least. A private key that others can read is refused.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from heapline.errors import BadRequest
from heapline.server.auth.private import refuse_readable_by_others


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    certificate: Path  # of this side, PEM, with intermediates
    key: Path  # its private key, PEM, mode 0600
    client_ca: Path | None = None  # authorities of client certificates; None asks for no certificate


@dataclass(frozen=True)
class PemParts:
    """What `grpc.ssl_server_credentials` wants: [(key, certificate)], client_ca, client_ca is not None."""

    key: bytes
    certificate: bytes
    client_ca: bytes | None

    def __repr__(self) -> str:
        return f"PemParts(mtls={self.client_ca is not None})"


def load_pem(files: TlsFiles) -> PemParts:
    refuse_readable_by_others(str(files.key))
    ssl_context(files)  # gRPC tells little about files that do not fit together; this does
    return PemParts(
        files.key.read_bytes(),
        files.certificate.read_bytes(),
        files.client_ca.read_bytes() if files.client_ca else None,
    )


def ssl_context(files: TlsFiles) -> ssl.SSLContext:
    """For a server."""
    refuse_readable_by_others(str(files.key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.certificate, files.key)
        if files.client_ca is not None:
            context.load_verify_locations(files.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise BadRequest(
            f"the TLS files {str(files.certificate)!r} and {str(files.key)!r} cannot be used: "
            f"{type(error).__name__}; `heapline certs dev DIR` makes a set that works"
        ) from None
    return context


def client_context(ca: Path, own: TlsFiles | None = None) -> ssl.SSLContext:
    """For a client that trusts `ca` alone; `own` is its certificate where the server asks for one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(ca)
    if own is not None:
        refuse_readable_by_others(str(own.key))
        context.load_cert_chain(own.certificate, own.key)
    return context
