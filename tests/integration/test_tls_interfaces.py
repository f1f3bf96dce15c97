"""TLS and mTLS on both ports of a real server, with the certificates of `heapline certs dev`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from heapline.cli.main import app
from heapline.client.target import ClientTls, parse_target
from heapline.client.transports.native import NativeBroker
from heapline.contract.errors import BadRequest, HeaplineError, Unauthenticated, UnavailableError
from heapline.server.auth.guard import DirectoryGuard
from heapline.server.auth.tls import TlsFiles
from heapline.server.settings import read_settings
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_rig import Keys, Rig
from tests.unit.server.auth.rig import client_context


@pytest.fixture(scope="module")
def make_certs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    def make() -> Path:
        directory = tmp_path_factory.mktemp("tls") / "certs"
        done = CliRunner().invoke(app, ["certs", "dev", str(directory)])
        assert done.exit_code == 0, done.output
        return directory

    return make


@pytest.fixture(scope="module")
def certs(make_certs: Callable[[], Path]) -> Path:
    return make_certs()


@pytest.fixture(scope="module")
def strangers(make_certs: Callable[[], Path]) -> Path:
    return make_certs()


def server_tls(certs: Path, mtls: bool = False) -> dict[str, Any]:
    files = {"tls_certificate": certs / "server.crt", "tls_key": certs / "server.key"}
    return files | ({"tls_client_ca": certs / "ca.crt"} if mtls else {})


def client_tls(ca: Path, own: Path | None = None) -> ClientTls:
    return ClientTls(ca=ca / "ca.crt", certificate=own and own / "client.crt", key=own and own / "client.key")


async def ask_grpc(rig: Rig, ca: Path, own: Path | None = None, credential: str | None = "key") -> None:
    url = f"heapline+tls://localhost:{rig.server.grpc_port}"
    async with RawGrpc(url, credential=credential, tls=client_tls(ca, own), timeout=10) as broker:
        await broker.list_topics()


async def ask_native(rig: Rig, ca: Path, own: Path | None = None, credential: str | None = "key") -> None:
    url = f"heapline+tls://localhost:{rig.server.port}"
    async with NativeBroker(url, credential=credential, tls=client_tls(ca, own), timeout=10) as broker:
        await broker.list_topics()
        assert broker._connection is not None
        tls = broker._connection._transport.get_extra_info("ssl_object")
        assert tls.selected_alpn_protocol() == "heapline/1"


async def ask_http(rig: Rig, ca: Path, own: Path | None = None, credential: str = "key") -> int:
    files = None if own is None else TlsFiles(certificate=own / "client.crt", key=own / "client.key")
    async with httpx.AsyncClient(verify=client_context(ca / "ca.crt", files), trust_env=False) as http:
        url = f"https://localhost:{rig.server.http_port}/v1/heaps"
        return (await http.get(url, headers={"authorization": f"Bearer {credential}"})).status_code


def some_key() -> Keys:
    return Keys(**{"key": "*:admin", "Bearer key": "*:admin"})


async def test_all_interfaces_serve_tls_with_development_certificates(tmp_path: Path, certs: Path) -> None:
    async with Rig(tmp_path, some_key(), **server_tls(certs)) as rig:
        await ask_grpc(rig, certs)
        await ask_native(rig, certs)
        assert await ask_http(rig, certs) == 200
        assert await ask_http(rig, certs, credential="wrong") == 401


async def test_client_without_tls_or_with_another_authority_is_refused(
    tmp_path: Path, certs: Path, strangers: Path
) -> None:
    async with Rig(tmp_path, some_key(), **server_tls(certs)) as rig:
        async with RawGrpc(rig.grpc_target, credential="key", timeout=10) as plain:
            with pytest.raises(UnavailableError):
                await plain.list_topics()
        async with NativeBroker(rig.target, credential="key", timeout=10) as plain_native:
            with pytest.raises(UnavailableError):
                await plain_native.list_topics()
        for ask in (ask_grpc, ask_native):
            with pytest.raises(UnavailableError):
                await ask(rig, strangers)
        with pytest.raises(httpx.ConnectError):
            await ask_http(rig, strangers)
        async with httpx.AsyncClient(trust_env=False) as http:
            with pytest.raises(httpx.HTTPError):
                await http.get(f"http://localhost:{rig.server.http_port}/healthz")


async def test_mtls_requires_a_certificate_that_grants_no_rights(tmp_path: Path, certs: Path, strangers: Path) -> None:
    async with Rig(tmp_path, some_key(), **server_tls(certs, mtls=True)) as rig:
        assert await ask_http(rig, certs, certs) == 200
        for ask in (ask_grpc, ask_native):
            await ask(rig, certs, certs)
            with pytest.raises(Unauthenticated):
                await ask(rig, certs, certs, credential=None)
        assert await ask_http(rig, certs, certs, credential="wrong") == 401
        for own in (None, strangers):
            for ask in (ask_grpc, ask_native):
                with pytest.raises(UnavailableError):
                    await ask(rig, certs, own)
            with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)):
                await ask_http(rig, certs, own)


async def test_renewed_certificate_is_used_without_a_restart(
    tmp_path: Path, certs: Path, make_certs: Callable[[], Path]
) -> None:
    used, renewed = tmp_path / "used", make_certs()
    shutil.copytree(certs, used)
    async with Rig(tmp_path, some_key(), **server_tls(used)) as rig:
        await ask_grpc(rig, certs)
        (used / "server.crt").write_bytes(b"half a renewal")
        await ask_grpc(rig, certs)  # an invalid pair is not used
        assert await ask_http(rig, certs) == 200
        for name in ("server.key", "server.crt"):
            shutil.copy(renewed / name, used / name)
        with pytest.raises(HeaplineError):
            await ask_grpc(rig, certs)
        await ask_grpc(rig, renewed)
        for _ in range(2):  # the first handshake may be the one that notices the change
            try:
                assert await ask_http(rig, renewed) == 200
                break
            except httpx.ConnectError:
                continue
        else:
            pytest.fail("HTTP does not use the new certificate")


async def test_key_of_a_directory_works_over_tls(tmp_path: Path, certs: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    guard = DirectoryGuard(data)
    admin_key = (data / "admin.key").read_text().strip()
    async with Rig(tmp_path, guard, **server_tls(certs)) as rig:
        await ask_grpc(rig, certs, credential=admin_key)
        assert await ask_http(rig, certs, credential=admin_key) == 200
    await guard.close()


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "queue.internal"])
def test_host_reachable_from_other_machines_needs_tls_or_plaintext(host: str, certs: Path) -> None:
    with pytest.raises(BadRequest, match=r"--tls-certificate .* --plaintext"):
        read_settings(host=host)
    assert read_settings(host=host, plaintext=True).tls_files() is None
    assert read_settings(host=host, **server_tls(certs)).tls_files() is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_no_tls(host: str) -> None:
    assert read_settings(host=host).tls_files() is None


def test_tls_comes_from_a_file_and_from_the_environment(
    tmp_path: Path, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "heapline.yaml"
    file.write_text(f"tls_certificate: {certs / 'server.crt'}\ntls_key: {certs / 'server.key'}\n")
    monkeypatch.setenv("HEAPLINE_TLS_CLIENT_CA", str(certs / "ca.crt"))
    files = read_settings(file).tls_files()
    assert files is not None
    assert files.client_ca == certs / "ca.crt"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"tls_certificate": Path("a")}, "belong together"),
        ({"tls_key": Path("a")}, "belong together"),
        ({"tls_client_ca": Path("a")}, "tls_certificate and tls_key too"),
    ],
)
def test_inconsistent_tls_settings_are_refused(given: dict[str, Path], match: str) -> None:
    with pytest.raises(BadRequest, match=match):
        read_settings(**given)


@pytest.mark.parametrize(
    ("target", "address", "secure"),
    [
        ("localhost:7400", "localhost:7400", False),
        ("heapline://q:1", "q:1", False),
        ("heapline+tls://q", "q:7400", True),
        ("heapline+tls://[::1]", "[::1]:7400", True),
        ("heapline+tls://[::1]:9/", "[::1]:9", True),
    ],
)
def test_target_contains_address_and_tls(target: str, address: str, secure: bool) -> None:
    found = parse_target(target)
    assert (str(found), found.tls is not None) == (address, secure)


@pytest.mark.parametrize("target", ["https://", "heapline+tls://", "heapline+tls://q/path", ""])
def test_target_without_a_server_is_refused(target: str) -> None:
    with pytest.raises(BadRequest):
        parse_target(target)
