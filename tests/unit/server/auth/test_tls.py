"""Development certificates in TLS handshakes in memory, without a socket."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509

from heapline.clock import SystemClock
from heapline.contract.errors import BadRequest
from heapline.server.auth.dev_certs import FILES, make_dev_certs
from heapline.server.auth.tls import TlsFiles, load_pem, ssl_context
from tests.unit.server.auth.rig import client_context

NOW = SystemClock().wall_ms()  # OpenSSL uses the system's clock


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls") / "certs"
    make_dev_certs(directory, NOW, ["queue.internal"])
    return directory


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls") / "strangers"
    make_dev_certs(directory, NOW)
    return directory


def server_files(certs: Path, mtls: bool = False) -> TlsFiles:
    ca = certs / "ca.crt" if mtls else None
    return TlsFiles(certificate=certs / "server.crt", key=certs / "server.key", client_ca=ca)


def client_files(certs: Path) -> TlsFiles:
    return TlsFiles(certificate=certs / "client.crt", key=certs / "client.key")


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> ssl.SSLObject:
    """Exchange bytes until both sides are done; return the client's certificate as the server sees it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    there = server.wrap_bio(to_server, to_client, server_side=True)
    here = client.wrap_bio(to_client, to_server, server_hostname=host)
    waiting = [here, there]
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                pass
        if not waiting:
            return there
    raise AssertionError("the handshake does not end")


def test_files_are_private_to_their_owner_and_contain_no_ca_key(certs: Path) -> None:
    assert sorted(path.name for path in certs.iterdir()) == sorted(FILES)
    assert {stat.S_IMODE(path.stat().st_mode) for path in certs.iterdir()} == {0o600}
    assert stat.S_IMODE(certs.stat().st_mode) == 0o700


def test_certificates_are_never_overwritten(certs: Path) -> None:
    before = {path: path.read_bytes() for path in certs.iterdir()}
    with pytest.raises(BadRequest, match="already"):
        make_dev_certs(certs, NOW)
    assert {path: path.read_bytes() for path in certs.iterdir()} == before


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "queue.internal"])
def test_client_that_trusts_the_ca_reaches_the_server_by_its_names(certs: Path, host: str) -> None:
    session = shake_hands(ssl_context(server_files(certs)), client_context(certs / "ca.crt"), host)
    assert session.version() in ("TLSv1.2", "TLSv1.3")


def test_client_refuses_another_name_and_another_authority(certs: Path, strangers: Path) -> None:
    for ca, host in ((certs, "elsewhere.example"), (strangers, "localhost")):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(ssl_context(server_files(certs)), client_context(ca / "ca.crt"), host)


def test_mtls_requires_a_client_certificate_of_its_authority(certs: Path, strangers: Path) -> None:
    server, ca = ssl_context(server_files(certs, mtls=True)), certs / "ca.crt"
    session = shake_hands(server, client_context(ca, client_files(certs)))
    assert session.getpeercert()
    for own in (None, client_files(strangers)):
        with pytest.raises(ssl.SSLError):
            shake_hands(server, client_context(ca, own))


def test_server_certificate_is_rejected_as_client_certificate(certs: Path) -> None:
    server = ssl_context(server_files(certs, mtls=True))
    with pytest.raises(ssl.SSLError):
        shake_hands(server, client_context(certs / "ca.crt", server_files(certs)))


def test_leaf_cannot_sign_others(certs: Path) -> None:
    for name, is_ca in (("ca.crt", True), ("server.crt", False), ("client.crt", False)):
        certificate = x509.load_pem_x509_certificate((certs / name).read_bytes())
        assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is is_ca


def test_pem_parts_are_in_the_form_that_grpc_accepts(certs: Path) -> None:
    parts = load_pem(server_files(certs, mtls=True))
    assert parts.key.startswith(b"-----BEGIN PRIVATE KEY-----")
    assert parts.certificate == (certs / "server.crt").read_bytes()
    assert parts.client_ca == (certs / "ca.crt").read_bytes()
    assert load_pem(server_files(certs)).client_ca is None


def test_key_that_others_can_read_is_refused(strangers: Path) -> None:
    (strangers / "server.key").chmod(0o644)
    try:
        for load in (load_pem, ssl_context):
            with pytest.raises(BadRequest, match="chmod 600"):
                load(server_files(strangers))
    finally:
        (strangers / "server.key").chmod(0o600)


def test_mismatched_certificate_files_are_reported(certs: Path, strangers: Path) -> None:
    with pytest.raises(BadRequest, match="cannot use the TLS files"):
        load_pem(TlsFiles(certificate=certs / "server.crt", key=strangers / "server.key"))
    with pytest.raises(BadRequest, match="cannot use the TLS files"):
        load_pem(TlsFiles(certificate=certs / "absent.crt", key=certs / "server.key"))
