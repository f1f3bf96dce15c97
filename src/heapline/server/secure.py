"""TLS on both ports, from the files that the settings name, and again from the same files when they are replaced.

Every handshake looks whether the files have changed (two `stat` calls) and later ones use the new certificate, so a
renewal needs no restart. Files that do not fit together leave the old certificate in use and say so in the log. New
authorities of client certificates are taken up by a restart.

A client certificate (mTLS) lets its owner get as far as sending a key and gives no rights of its own: who calls and
what they may do is told by the key or token alone, because those can be revoked at once and a certificate cannot.
"""

from __future__ import annotations

import os
import ssl
from typing import Any

import grpc

from heapline.errors import BadRequest
from heapline.logs import Log
from heapline.server.auth.tls import PemParts, TlsFiles, load_pem, ssl_context

log = Log("heapline.server")


class Watched:
    """Tells when the certificate or its key is another file than last time."""

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self._seen = self._look()

    def _look(self) -> tuple[tuple[int, int, int], ...] | None:
        try:
            found = [os.stat(path) for path in (self.files.certificate, self.files.key)]
        except OSError:
            return None  # one file is being replaced: look again at the next handshake
        return tuple((s.st_ino, s.st_mtime_ns, s.st_size) for s in found)

    def changed(self) -> bool:
        now = self._look()
        if now is None or now == self._seen:
            return False
        self._seen = now
        return True


def open_grpc(server: Any, host: str, port: int, files: TlsFiles | None) -> int:
    """Returns the port."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if files is None:
        opened: int = server.add_insecure_port(address)
    else:
        opened = server.add_secure_port(address, grpc_credentials(files))
    return opened


def grpc_credentials(files: TlsFiles) -> Any:
    """Blocks on the disk; raises BadRequest for files that cannot be used."""
    watched = Watched(files)

    def fetch() -> Any:
        if not watched.changed():
            return None
        try:
            made = _configuration(load_pem(files))
        except (BadRequest, OSError) as error:
            log.error("a new TLS certificate cannot be used; the old one stays", cause=type(error).__name__)
            return None
        log.info("a new TLS certificate is in use", face="grpc")
        return made

    first = _configuration(load_pem(files))
    return grpc.dynamic_ssl_server_credentials(
        first, fetch, require_client_authentication=files.client_ca is not None
    )  # fmt: skip


def _configuration(parts: PemParts) -> Any:
    return grpc.ssl_server_certificate_configuration(((parts.key, parts.certificate),), parts.client_ca)


def http_context(files: TlsFiles) -> ssl.SSLContext:
    """Blocks on the disk; raises BadRequest for files that cannot be used."""
    watched, context = Watched(files), ssl_context(files)

    def look(connection: ssl.SSLObject, name: str | None, given: ssl.SSLContext) -> None:
        if watched.changed():
            try:
                ssl_context(files)  # tried on another one first: half a change would break the one in use
                context.load_cert_chain(files.certificate, files.key)
                connection.context = context  # this very connection too
                log.info("a new TLS certificate is in use", face="http")
            except (BadRequest, OSError) as error:
                log.error("a new TLS certificate cannot be used; the old one stays", cause=type(error).__name__)

    context.sni_callback = look  # also called for clients that name no server
    return context
