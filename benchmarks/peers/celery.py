"""Celery on Redis, its usual broker: the same server as in redis.py; client and worker run in the driver."""

from __future__ import annotations

from typing import ClassVar

from benchmarks.peers import install
from benchmarks.peers.redis import Redis


class Celery(Redis):
    driver: ClassVar[str] = "celery"
    clients: ClassVar[tuple[str, ...]] = ("celery", "packaging", "redis", "hiredis", "uvloop")
    durability: ClassVar[str] = (
        "every command: append-only file with an fsync before the answer (appendfsync always); acks_late, no results; "
        "2 processes (prefork), 64 prefetched"
    )

    @property
    def version(self) -> str:
        return f"{install.package_versions(self._python, 'celery', 'kombu')}; {super().version}"
