"""A data directory: its lock, the folders of its topics, and what their loaders share.

A topic's folder is complete before the catalog names it, and the catalog no longer names it before the folder is
deleted. So a crash in between leaves at most a folder that the next open deletes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import cache, partial
from random import SystemRandom
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.clock import Clock
from heapline.contract.config import BrokerConfig, TopicConfig
from heapline.contract.errors import BadRequest
from heapline.contract.ids import SUFFIX_BITS
from heapline.core.partition import Draw
from heapline.engine.catalog import Catalog, Entry
from heapline.engine.loaded_topic import Loader
from heapline.journal.disk import Disk
from heapline.journal.records import CacheBudget
from heapline.journal.spares import SparePool


class DataDirectory:
    """Everything here blocks; it runs in a thread."""

    def __init__(
        self,
        path: str,
        disk: Disk,
        config: BrokerConfig,
        clock: Clock,
        draw: Draw | None,
        draw_id_suffix: Callable[[], int] | None,
    ) -> None:
        self.path, self.disk, self._clock = path, disk, clock
        self._draw: Draw = draw or _draw_jitter
        self._draw_id_suffix = draw_id_suffix or partial(SystemRandom().getrandbits, SUFFIX_BITS)  # once per topic
        self._spare_bytes = config.spare_segment_bytes
        self.budget = CacheBudget(config.cache_bytes)
        self._pools: dict[int, SparePool] = {}
        self._lock: Any = None

    def open(self) -> Catalog:
        self._make_directory()
        self._lock = self.disk.lock(f"{self.path}/LOCK")
        catalog = Catalog(self.disk, self.path)
        catalog.make()
        self._sweep(catalog)
        return catalog

    def _make_directory(self) -> None:
        """Create the directory durably: if its parent lost it in a power cut, every topic would be lost."""
        made, path = [], os.path.abspath(self.path)
        while not self.disk.exists(path):
            made.append(path)
            path = os.path.dirname(path)
        try:
            self.disk.mkdir(self.path)
        except (FileExistsError, NotADirectoryError):
            text = f"cannot create the data directory {self.path!r}: a part of the path is a file; choose another path"
            raise BadRequest(text) from None
        for path in reversed(made):
            self.disk.fsync_dir(os.path.dirname(path))

    def _sweep(self, catalog: Catalog) -> None:
        """Delete folders of topics that were deleted, or whose creation did not finish.

        A folder that is newer than the catalog is kept: the catalog may be an old one that an operator restored.
        """
        kept = {entry.folder for entry in catalog.entries.values()}
        top = f"{self.path}/topics"
        if not self.disk.exists(top):
            return
        for namespace in self.disk.listdir(top):
            for folder in self.disk.listdir(f"{top}/{namespace}"):
                incarnation = folder.removesuffix(".new").rpartition(".")[2]
                known = incarnation.isdigit() and int(incarnation) < catalog.next_incarnation
                if known and f"topics/{namespace}/{folder}" not in kept:
                    self.disk.remove_tree(f"{top}/{namespace}/{folder}")

    def make_topic(self, catalog: Catalog, namespace: str, name: str, config: TopicConfig) -> Entry:
        """Make a topic's folder, then name it in the catalog: the next open deletes a folder that is not named."""
        entry = catalog.planned(namespace, name, config, self._draw_id_suffix())
        folder = f"{self.path}/topics/{namespace}"
        self.disk.mkdir(folder)
        self.disk.fsync_dir(f"{self.path}/topics")
        self.disk.fsync_dir(self.path)
        self.disk.remove_tree(f"{self.path}/{entry.folder}")
        try:
            self.loader(entry).create()
            catalog.add(entry)
            return entry
        except OSError:
            with contextlib.suppress(OSError):  # the next open deletes the rest
                self.disk.remove_tree(f"{self.path}/{entry.folder}.new")
                self.disk.remove_tree(f"{self.path}/{entry.folder}")
            raise

    def loader(self, entry: Entry) -> Loader:
        return Loader(
            self.disk,
            f"{self.path}/{entry.folder}",
            entry.topic,
            entry.incarnation,
            entry.config,
            id_suffix=entry.id_suffix,
            floor_ms=entry.floor_ms,
            clock=self._clock,
            draw=self._draw,
            spares=self._pool(entry.config.segment_bytes),
            budget=self.budget,
        )

    def _pool(self, segment_bytes: int) -> SparePool | None:
        """Return the spare segments, shared by the topics whose segments are no larger."""
        if not self._spare_bytes:
            return None
        size = max(segment_bytes, self._spare_bytes)
        if size not in self._pools:
            self._pools[size] = SparePool(self.disk, f"{self.path}/spare/{size}", size)
        return self._pools[size]

    def remove_topic(self, entry: Entry) -> None:
        self.disk.remove_tree(f"{self.path}/{entry.folder}")

    def release(self) -> None:
        """Let another process open the directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


@cache
def _generator() -> np.random.Generator:
    return np.random.default_rng()


def _draw_jitter(count: int) -> npt.NDArray[np.float64]:
    """Draw from numpy's generator, which is imported with the first retry."""
    return _generator().random(count)
