"""URLs with TLS: a node verifies the certificate of the server, for every connection to PostgreSQL and to Redis."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import heapline
import heapline.sql
from heapline.server.auth.dev_certs import make_dev_certs
from tests.integration.tls_proxy import TlsProxy
from tests.postgres import fresh_schema, shared_port
from tests.valkey import fresh_redis

pytest.importorskip("asyncpg")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls") / "certs"
    make_dev_certs(directory, round(time.time() * 1000))
    return directory


@pytest.fixture(scope="module")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("other") / "certs"
    make_dev_certs(directory, round(time.time() * 1000))
    return directory / "ca.crt"


def postgres_url(proxy: TlsProxy, options: str, host: str = "127.0.0.1") -> str:
    return f"postgresql://postgres@{host}:{proxy.port}/postgres?{options}"


async def test_node_verifies_postgres_and_redis(certificates: Path) -> None:
    redis_port, _, database = fresh_redis().rpartition(":")[2].partition("/")
    async with (
        TlsProxy(shared_port(), certificates, is_postgres=True) as postgres,
        TlsProxy(int(redis_port), certificates) as redis,
    ):
        ca = certificates / "ca.crt"
        settings: dict[str, Any] = {
            "schema": fresh_schema(),
            "redis": f"rediss://127.0.0.1:{redis.port}/{database}?ssl_ca_certs={ca}",
            "durability": "redis",
        }
        url = postgres_url(postgres, f"sslmode=verify-full&sslrootcert={ca}")
        async with heapline.sql.open([url], **settings) as hl:
            await hl.create_topic("jobs", k=10)
            await hl.enqueue("jobs", b"x")
            assert [m.payload for m in await hl.pop("jobs", 10, wait=5.0)] == [b"x"]
            await hl.node.shards[0].wakeups.listening.wait()  # on a separate connection
            assert hl.node.redis.is_up
        assert postgres.accepted >= 2
        assert redis.accepted >= 1


async def test_postgres_with_a_certificate_of_another_authority_is_refused(certificates: Path, other_ca: Path) -> None:
    async with TlsProxy(shared_port(), certificates, is_postgres=True) as proxy:
        url = postgres_url(proxy, f"sslmode=verify-full&sslrootcert={other_ca}")
        with pytest.raises(heapline.UnavailableError, match="certificate verify failed"):
            async with heapline.sql.open([url], schema=fresh_schema()):
                pass
        assert proxy.accepted == 0


async def test_postgres_under_another_host_name_is_refused(certificates: Path) -> None:
    async with TlsProxy(shared_port(), certificates, is_postgres=True) as proxy:
        url = postgres_url(proxy, f"sslmode=verify-full&sslrootcert={certificates / 'ca.crt'}", host="127.0.0.2")
        with pytest.raises(heapline.UnavailableError):
            async with heapline.sql.open([url], schema=fresh_schema()):
                pass


async def test_postgres_without_tls_is_refused(certificates: Path) -> None:
    url = f"postgresql://postgres@127.0.0.1:{shared_port()}/postgres?sslmode=verify-full&sslrootcert="
    with pytest.raises(heapline.UnavailableError, match="cannot open shard 0"):
        async with heapline.sql.open([url + str(certificates / "ca.crt")], schema=fresh_schema()):
            pass


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_redis_with_a_certificate_of_another_authority_is_not_used(
    certificates: Path, other_ca: Path, host: str
) -> None:
    port, _, database = fresh_redis().rpartition(":")[2].partition("/")
    async with TlsProxy(int(port), certificates) as proxy:
        redis = f"rediss://{host}:{proxy.port}/{database}?ssl_ca_certs={other_ca}"
        url = f"postgresql://postgres@127.0.0.1:{shared_port()}/postgres"
        async with heapline.sql.open([url], schema=fresh_schema(), redis=redis, durability="redis") as hl:
            await hl.create_topic("jobs", k=10)
            with pytest.raises(heapline.UnavailableError, match="redis is down"):
                await hl.enqueue("jobs", b"x")
        assert proxy.accepted == 0
