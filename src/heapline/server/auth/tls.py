"""TLS and mTLS: read the files that the settings name, and read them again when they are replaced.

Every handshake checks whether the files have changed (two `stat` calls), so a renewed certificate needs no restart. If
the new files do not work together, the old certificate stays in use and the log says so. New authorities of client
certificates take effect at a restart. TLS 1.2 is the minimum. A private key that other users can read is rejected.

With `client_ca`, only clients with a certificate of that authority can send a key (mTLS). A client certificate grants
no rights: the key or token alone says who calls, because it can be revoked immediately and a certificate cannot.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from heapline.contract.errors import BadRequest
from heapline.logs import Log
from heapline.server.auth.secret import refuse_readable_by_others

log = Log("heapline.server")


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    certificate: Path  # of this side, PEM, with intermediates
    key: Path  # its private key, PEM, mode 0600
    client_ca: Path | None = None  # authorities of client certificates; None: no client certificate is required


@dataclass(frozen=True)
class PemParts:
    """The arguments of `grpc.ssl_server_credentials`."""

    key: bytes
    certificate: bytes
    client_ca: bytes | None

    def __repr__(self) -> str:
        return f"PemParts(mtls={self.client_ca is not None})"


def load_pem(files: TlsFiles) -> PemParts:
    refuse_readable_by_others(str(files.key))
    ssl_context(files)  # explains files that do not match; gRPC does not
    return PemParts(
        files.key.read_bytes(),
        files.certificate.read_bytes(),
        files.client_ca.read_bytes() if files.client_ca else None,
    )


def ssl_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of a server."""
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
            f"cannot use the TLS files {str(files.certificate)!r} and {str(files.key)!r}: {type(error).__name__}; "
            "`heapline certs dev DIR` creates a set that works"
        ) from None
    return context


# -- replaced files ----------------------------------------------------------------------------------------------------


class WatchedFiles:
    """Detects that the certificate or its key was replaced."""

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self._seen = self._identity()

    def _identity(self) -> tuple[tuple[int, int, int], ...] | None:
        try:
            found = [os.stat(path) for path in (self.files.certificate, self.files.key)]
        except OSError:
            return None  # a file is being replaced: check again at the next handshake
        return tuple((s.st_ino, s.st_mtime_ns, s.st_size) for s in found)

    def changed(self) -> bool:
        now = self._identity()
        if now is None or now == self._seen:
            return False
        self._seen = now
        return True


def grpc_credentials(files: TlsFiles) -> Any:
    """Return gRPC's server credentials. Blocks on the disk; raises BadRequest if the files cannot be used."""
    watched = WatchedFiles(files)

    def fetch() -> Any:
        if not watched.changed():
            return None
        try:
            made = _configuration(load_pem(files))
        except (BadRequest, OSError) as error:
            log.error("new TLS certificate cannot be used; keeping the old one", cause=type(error).__name__)
            return None
        log.info("new TLS certificate in use", interface="grpc")
        return made

    first = _configuration(load_pem(files))
    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=files.client_ca is not None)


def _configuration(parts: PemParts) -> Any:
    return grpc.ssl_server_certificate_configuration(((parts.key, parts.certificate),), parts.client_ca)


def reloading_context(files: TlsFiles, interface: str) -> ssl.SSLContext:
    """Return the context of a port. Blocks on the disk; raises BadRequest if the files cannot be used."""
    watched, context = WatchedFiles(files), ssl_context(files)

    def check_files(connection: ssl.SSLObject, name: str | None, given: ssl.SSLContext) -> None:
        if watched.changed():
            try:
                ssl_context(files)  # tried on another context first: half a change would break the one in use
                context.load_cert_chain(files.certificate, files.key)
                connection.context = context  # for this connection too
                log.info("new TLS certificate in use", interface=interface)
            except (BadRequest, OSError) as error:
                log.error("new TLS certificate cannot be used; keeping the old one", cause=type(error).__name__)

    context.sni_callback = check_files  # also called for clients that name no server
    return context
