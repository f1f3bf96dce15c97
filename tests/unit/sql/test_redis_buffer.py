"""The durability of an acknowledgment by Redis, by the settings of the server."""

from __future__ import annotations

import pytest

pytest.importorskip("asyncpg")
from heapline.sql.redis_buffer import durability_of

SAFE = {"appendonly": "yes", "appendfsync": "always", "maxmemory": "0", "maxmemory-policy": "noeviction"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (SAFE, "every answer is durable"),
        (SAFE | {"appendfsync": "everysec"}, "appendfsync everysec"),
        (SAFE | {"appendonly": "no"}, "append-only file is off"),
        (SAFE | {"maxmemory": "100", "maxmemory-policy": "allkeys-lru"}, "maxmemory-policy allkeys-lru"),
        (SAFE | {"maxmemory-policy": "allkeys-lru"}, "every answer is durable"),
        (SAFE | {"maxmemory": "100", "maxmemory-policy": "volatile-ttl"}, "every answer is durable"),
        ({}, "may not read its settings"),
    ],
)
def test_durability_follows_the_settings_of_redis(settings: dict[str, str], text: str) -> None:
    assert text in durability_of(settings)
