"""A certificate authority for development: one CA, one server and one client certificate, in one directory.

The certificates are valid for a year, for localhost and the given names. The CA's own key is discarded after signing,
so it cannot be used to create more certificates that this machine would trust. Existing files are never overwritten.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from heapline.contract.errors import BadRequest
from heapline.server.auth.private_files import PrivateDisk

FILES = ("ca.crt", "server.crt", "server.key", "client.crt", "client.key")
HOSTS = ("localhost", "127.0.0.1", "::1")
VALID_FOR = timedelta(days=365)
_EARLIER = timedelta(minutes=5)  # the clocks of containers differ a little


def make_dev_certs(directory: Path, now_ms: int, hosts: Sequence[str] = ()) -> list[Path]:
    existing = [name for name in FILES if (directory / name).exists()]
    if existing:
        raise BadRequest(
            f"{str(directory)!r} already contains {', '.join(existing)}; choose another directory, or remove them"
        )
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    ca = _Authority(now)
    server, server_key = ca.sign("heapline server", ExtendedKeyUsageOID.SERVER_AUTH, [*HOSTS, *hosts])
    client, client_key = ca.sign("heapline client", ExtendedKeyUsageOID.CLIENT_AUTH, [])
    contents = (_pem(ca.certificate), _pem(server), _key_pem(server_key), _pem(client), _key_pem(client_key))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    disk = PrivateDisk()
    for name, content in zip(FILES, contents, strict=True):
        disk.write_file_atomic(str(directory / name), content)
    return [directory / name for name in FILES]


class _Authority:
    def __init__(self, now: datetime) -> None:
        self._now = now
        self._key = generate_private_key(SECP256R1())
        self._name = _name("heapline development CA")
        builder = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, 0), critical=True)
        self.certificate = builder.add_extension(_usage(signs=True), critical=True).sign(self._key, hashes.SHA256())

    def _builder(self, subject: x509.Name, key: EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        public = key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _EARLIER)
            .not_valid_after(self._now + VALID_FOR)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )

    def sign(
        self, name: str, purpose: x509.ObjectIdentifier, hosts: Sequence[str]
    ) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
        key = generate_private_key(SECP256R1())
        builder = (
            self._builder(_name(name), key)
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256()), key


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
