"""Celery on Redis, its usual broker: the same server as in redis.py; client and worker run in the driver.

Measured as durable as Heapline, and with the usual settings.
"""

from __future__ import annotations

from typing import ClassVar

from benchmarks.peers import install
from benchmarks.peers.redis import Redis

HOW = "acks_late, no results; 2 processes (prefork), 64 prefetched"


class Celery(Redis):
    driver: ClassVar[str] = "celery"
    clients: ClassVar[tuple[str, ...]] = ("celery", "packaging", "redis", "hiredis", "uvloop")
    durability: ClassVar[str] = (
        f"every command: append-only file with an fsync before the answer (appendfsync always); {HOW}"
    )

    @property
    def version(self) -> str:
        return f"{install.package_versions(self._python, 'celery', 'kombu')}; {super().version}"


class CeleryEverysec(Celery):
    fsync: ClassVar[str] = "everysec"
    durability: ClassVar[str] = f"an fsync per second: calls answered since the last one may be lost; {HOW}"
