"""Which topics a data directory holds, and their configs: one small file, replaced whole.

`catalog.json`, format version 1. Ritual for changing it: bump the version, keep reading the old one, add a fixture.
An incarnation number is never given twice, so a deleted and re-made topic shares nothing with the old one.
"""

from __future__ import annotations

import msgspec

from heapline.config import TopicConfig
from heapline.errors import CorruptionError, UnknownFormat
from heapline.journal.disk import Disk

VERSION = 1
FILE = "catalog.json"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str
    name: str
    incarnation: int
    config: TopicConfig

    @property
    def topic(self) -> str:
        return self.name if self.namespace == "default" else f"{self.namespace}/{self.name}"

    @property
    def folder(self) -> str:
        return f"topics/{self.namespace}/{self.name}.{self.incarnation}"


class _File(msgspec.Struct, kw_only=True):
    version: int
    next_incarnation: int = 1
    topics: list[Entry] = []


class Catalog:
    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._path = f"{directory}/{FILE}"
        self._file = self._load()
        self.entries: dict[tuple[str, str], Entry] = {(e.namespace, e.name): e for e in self._file.topics}

    def _load(self) -> _File:
        if not self._disk.exists(self._path):
            return _File(version=VERSION)
        data = self._disk.read_file(self._path)
        try:
            version = msgspec.json.decode(data, type=dict)["version"]
            if version != VERSION:
                raise UnknownFormat(self._path, version)
            return msgspec.json.decode(data, type=_File)
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError) as error:
            raise CorruptionError(
                f"{self._path} cannot be read ({error}): restore it from a backup; the topics' own files are untouched"
            ) from error

    def planned(self, namespace: str, name: str, config: TopicConfig) -> Entry:
        """What `add` would add: its folder is made first."""
        return Entry(namespace=namespace, name=name, incarnation=self._file.next_incarnation, config=config)

    def add(self, namespace: str, name: str, config: TopicConfig) -> Entry:
        entry = self.planned(namespace, name, config)
        self._save(self.entries | {(namespace, name): entry}, self._file.next_incarnation + 1)
        return entry

    def change(self, entry: Entry, config: TopicConfig) -> Entry:
        changed = msgspec.structs.replace(entry, config=config)
        self._save(self.entries | {(entry.namespace, entry.name): changed}, self._file.next_incarnation)
        return changed

    def remove(self, entry: Entry) -> None:
        kept = {place: e for place, e in self.entries.items() if e is not entry}
        self._save(kept, self._file.next_incarnation)

    def _save(self, entries: dict[tuple[str, str], Entry], next_incarnation: int) -> None:
        """Durable first, then true in memory."""
        file = _File(version=VERSION, next_incarnation=next_incarnation, topics=list(entries.values()))
        self._disk.write_file_atomic(self._path, msgspec.json.format(msgspec.json.encode(file), indent=1))
        self._file, self.entries = file, entries
