"""Assign topics to shards: FNV-1a of namespace and name, 32 bits, modulo the number of shards.

The location of stored messages depends on it, so it is pinned by a golden test and must never change.
"""

from __future__ import annotations

_OFFSET, _PRIME, _MASK = 0x811C9DC5, 0x01000193, 0xFFFFFFFF


def fnv32a(data: bytes) -> int:
    value = _OFFSET
    for byte in data:
        value = (value ^ byte) * _PRIME & _MASK
    return value


def shard_of(namespace: str, name: str, shards: int) -> int:
    """Return the index of the shard that holds a topic."""
    return fnv32a((namespace + name).encode()) % shards
