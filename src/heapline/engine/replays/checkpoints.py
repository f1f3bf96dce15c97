"""Checkpoints of replays to subscribers, by name: one file each, in the folder of their topic.

A checkpoint is deleted with its topic: a new topic under the same name starts without checkpoints. A checkpoint names
its topic's incarnation nevertheless, because folders can be copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import msgspec

from heapline.contract.errors import BadRequest, UnavailableError
from heapline.engine.replays import files
from heapline.engine.runner import TopicRunner
from heapline.logs import Log

log = Log("heapline.replay")
#: Two concurrent writes would write the same file, and one would lose the other's partitions.
_locks: WeakKeyDictionary[TopicRunner, asyncio.Lock] = WeakKeyDictionary()


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: int
    positions: dict[int, int]  # partition -> next offset
    at_ms: int


def _folder(runner: TopicRunner) -> str:
    return f"{runner.loader.directory}/{files.FOLDER}"


async def find(runner: TopicRunner, name: str) -> dict[int, int]:
    path = f"{_folder(runner)}/{name}.json"
    found: Checkpoint | None = await runner.io.run(files.load, runner.loader.disk, path, Checkpoint)
    if found is None:
        return {}
    if found.incarnation != runner.loader.incarnation:
        log.warning("checkpoint of a topic that was deleted, not used", topic=runner.name, checkpoint=name)
        return {}
    return found.positions


async def keep(runner: TopicRunner, name: str, positions: Mapping[int, int]) -> None:
    """Save positions. Durable on return. Partitions that are not named keep their saved position."""
    for partition, offset in positions.items():
        if not 0 <= partition < len(runner.loaded.topic.partitions) or not 0 <= offset <= 1 << 62:
            raise BadRequest(f"topic {runner.name!r} has no offset {offset} in partition {partition}")
    async with _locks.setdefault(runner, asyncio.Lock()):
        known = await find(runner, name)
        checkpoint = Checkpoint(
            incarnation=runner.loader.incarnation, positions={**known, **positions}, at_ms=runner.wall_ms()
        )
        try:
            await files.to_its_end(runner.io.run(_save, runner, name, checkpoint))
        except OSError as error:
            raise UnavailableError(f"checkpoint {name!r} cannot be written: {error.strerror}") from None


def _save(runner: TopicRunner, name: str, checkpoint: Checkpoint) -> None:
    files.make_folder(runner.loader.disk, _folder(runner))
    files.save(runner.loader.disk, f"{_folder(runner)}/{name}.json", checkpoint)
